"""Load a `Config` from a recipe file and overrides, with the origin of every value.

A recipe is YAML. `extends: other.yaml` (relative to the file) inherits all values of another recipe; dotted
overrides `actor.learning_rate=3e-4` come last. `config/validation.py` checks whether the values make sense together.
A name without a path or suffix, `grpo_arithmetic`, is a recipe of the package, unless a file of that name exists.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

import kintsugi
from kintsugi.config.custom_algorithm import is_custom_name, load_custom_algorithm
from kintsugi.config.schema import (
    ENGINES,
    AlgorithmSection,
    Config,
    CriticSection,
    DataSection,
    ReferenceSection,
    SourceSection,
)
from kintsugi.config.stages import stages
from kintsugi.errors import ConfigError, StorageError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.runtime.disk import write_atomically

COMMAND_LINE = "command line"
DEFAULT = "default"
PYTHON = "Python"
DEFAULT_OF = "default of "
"""Origin of a value that the algorithm decides."""

Tree = dict[str, Any]
Origins = dict[str, str]
S = TypeVar("S", bound=SourceSection)


class Resolved(msgspec.Struct, frozen=True):
    """A configuration and the origin of each of its values: `{"actor.workers": "recipes/mine.yaml", …}`."""

    config: Config
    origins: Origins


def recipes_folder() -> Path:
    """Return the folder of the recipes that are part of the package."""
    return Path(kintsugi.__file__).parent / "recipes"


def packaged_recipes() -> dict[str, Path]:
    """Return the recipes of the package by name, sorted."""
    return {path.stem: path for path in sorted(recipes_folder().glob("*.yaml"))}


def description(path: Path) -> str:
    """Return the first sentence of the comment that a recipe begins with."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            break
        lines.append(text)
    text = " ".join(lines)
    sentence = re.match(r".{20,}?\.(?=\s|$)", text)  # "Dr. GRPO" does not end a sentence.
    return sentence[0] if sentence else text


def find_recipe(path: Path) -> Path:
    """Return the file that a recipe argument means: the path itself, or the packaged recipe of that name.

    `recipes/NAME.yaml` means the packaged recipe too, where no such file exists. Raises ConfigError with the closest
    names for a name that is neither.
    """
    if path.is_file():
        return path
    packaged = packaged_recipes().get(path.stem)
    if path.parts == ("recipes", f"{path.stem}.yaml") and packaged is not None:
        return packaged
    if not _is_name(path):
        return path
    if packaged is None:
        raise ConfigError(
            f"{path}: expected a recipe file or the name of a packaged recipe (`kintsugi recipes` lists them), "
            f"found neither{_close_recipes(path)}"
        )
    return packaged


def _is_name(path: Path) -> bool:
    return len(path.parts) == 1 and not path.suffix


def _close_recipes(path: Path) -> str:
    """Return the end of a sentence about a recipe that does not exist: the closest names in the package."""
    close = difflib.get_close_matches(path.stem, packaged_recipes(), n=3)
    return f"; the closest packaged recipes: {', '.join(close)}" if close else ""


def load(path: str | Path, overrides: Sequence[str] = ()) -> Resolved:
    """Read a recipe and the recipes it extends, apply the overrides, and convert the result strictly."""
    tree: Tree = {}
    origins: Origins = {}
    for origin, layer in _layers(Path(path)):
        _merge(tree, layer, origin=origin, origins=origins)
    given = [_parse_override(override) for override in overrides]
    if any(
        "name" in layer.get("algorithm", {}) for layer in given if isinstance(layer.get("algorithm"), dict)
    ):
        _forget_algorithm_defaults(tree, beside=Path(path))
    for layer in given:
        _merge(tree, layer, origin=COMMAND_LINE, origins=origins)
    return _resolved(tree, origins)


def _forget_algorithm_defaults(tree: Tree, *, beside: Path) -> None:
    """Open the values again that a run's `config.yaml` has from the defaults of its algorithm: another one has
    others."""
    try:
        recorded = msgspec.json.decode(
            RunFolder(beside.parent).origins_file.read_bytes(), type=dict[str, str]
        )
    except (OSError, msgspec.MsgspecError):
        return
    section = tree.get("algorithm")
    for field, origin in recorded.items():
        if origin.startswith(DEFAULT_OF) and isinstance(section, dict):
            section[field.removeprefix("algorithm.")] = None


def given(config: Config, overrides: Sequence[str] = ()) -> Resolved:
    """Convert a configuration that was built in Python, as strictly as a file; overrides take precedence."""
    tree: Tree = msgspec.to_builtins(config, enc_hook=str)
    untouched = fields_of(Config(name=""))
    origins = {field: PYTHON for field, value in _leaves(tree) if value != untouched.get(field)}
    for override in overrides:
        _merge(tree, _parse_override(override), origin=COMMAND_LINE, origins=origins)
    return _resolved(tree, origins)


def rollout_only(resolved: Resolved, *, steps: int) -> Resolved:
    """Change a run to sample, score and save completions for a number of steps, without training."""
    config = resolved.config
    algorithm = AlgorithmSection(
        name="rollout",
        steps=steps,
        batch_size=config.algorithm.batch_size,
        group_size=stages(config)[-1].algorithm.group_size,
        reward=config.algorithm.reward,
    )
    config = msgspec.structs.replace(
        config,
        algorithm=algorithm,
        actor=msgspec.structs.replace(config.actor, warmup_steps=0),
        critic=CriticSection(),
        reference=ReferenceSection(),
        reward_model=None,
    )
    origins = {field: resolved.origins.get(field, COMMAND_LINE) for field in fields_of(config)}
    return Resolved(config, origins)


def _list_single_reward(tree: Tree) -> None:
    """Take `algorithm.reward: my.function` for a list of one."""
    section = tree.get("algorithm")
    if isinstance(section, dict) and isinstance(section.get("reward"), str):
        section["reward"] = [section["reward"]]


def _resolved(tree: Tree, origins: Origins) -> Resolved:
    _list_single_reward(tree)
    _expand_custom_algorithm(tree, origins)
    config = _convert(tree, origins=origins)
    for field in fields_of(config):
        origins.setdefault(field, DEFAULT)
    return Resolved(config, {field: origins[field] for field in fields_of(config)})


def _expand_custom_algorithm(tree: Tree, origins: Origins) -> None:
    """Replace an `algorithm.name` that is a path by base and path, and add the defaults of that algorithm."""
    section = tree.get("algorithm")
    path = section.get("name") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(path, str) or not is_custom_name(path):
        return
    custom = load_custom_algorithm(path, field="algorithm.name")
    section.update(name=custom.base, custom=path)
    origins["algorithm.custom"] = origins["algorithm.name"]
    for field, value in custom.defaults.items():
        if f"algorithm.{field}" not in origins or section.get(field) is None:
            section[field] = value
            origins[f"algorithm.{field}"] = path


def dump(config: Config, path: Path) -> None:
    """Write all values, including defaults, for this user only; `load_config` returns an equal `Config`."""
    text = yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True, width=120)
    try:
        write_atomically(path, text.encode(), durable=True, mode=0o600)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def load_config(path: Path) -> Config:
    """Read a configuration that `dump` wrote; unknown fields are refused."""
    return _convert(_read_yaml(path, named_by=None), origins={}, where=str(path))


def anchored(config: Config) -> Config:
    """Make all paths absolute, as processes and a later `resume` may run in other folders."""
    replace = msgspec.structs.replace
    for name in ("model", "critic", "reference", "reward_model"):
        section = getattr(config, name)
        if section is not None and section.path is not None:
            folder = replace(section, path=str(Path(section.path).resolve()))
            config = replace(config, **{name: folder})
    config = replace(config, data=_anchored_data(config.data))
    if config.run_dir is not None:
        config = replace(config, run_dir=str(Path(config.run_dir).resolve()))
    if (copies := config.checkpoint.copy_to) and "://" not in copies:
        config = replace(config, checkpoint=replace(config.checkpoint, copy_to=str(Path(copies).resolve())))
    if (template := config.cluster.kubernetes.template) != "":
        kubernetes = replace(config.cluster.kubernetes, template=str(Path(template).resolve()))
        config = replace(config, cluster=replace(config.cluster, kubernetes=kubernetes))
    if config.cluster.on and config.cluster.on not in ENGINES:
        config = replace(config, cluster=replace(config.cluster, on=str(Path(config.cluster.on).resolve())))
    algorithm = config.algorithm
    rewards = tuple(map(_anchored_code, algorithm.reward))
    custom = None if algorithm.custom is None else _anchored_code(algorithm.custom)
    return replace(config, algorithm=replace(algorithm, reward=rewards, custom=custom))


def _anchored_code(path: str) -> str:
    """`rewards.py:brevity` names a file; `package.module.brevity` does not."""
    file, colon, name = path.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if colon else path


def _anchored_data(data: DataSection) -> DataSection:
    replace = msgspec.structs.replace
    sources = tuple(_anchored_source(each) for each in data.sources)
    cache_dir = str(Path(data.cache_dir).expanduser().resolve())
    return replace(_anchored_source(data), sources=sources, cache_dir=cache_dir)


def _anchored_source(section: S) -> S:
    replace, given = msgspec.structs.replace, section.eval_source
    eval_source = None if given is None else anchored_path(given)
    return replace(section, source=anchored_path(section.source), eval_source=eval_source)


def anchored_path(source: str) -> str:
    """Make the path of a data source absolute, including `folder:split` and `stream:PATH`."""
    if source in ("arithmetic", "arithmetic:words", "arithmetic:products", "stream:-") or source.startswith(
        ("reasoning_gym:", "hf:")
    ):
        return source
    if source.startswith("stream:"):
        return f"stream:{Path(source.removeprefix('stream:')).resolve()}"
    return str(Path(source).resolve())


def fields_of(config: Config) -> dict[str, Any]:
    """Values by dotted field, in the order of declaration; an absent section is one field that is None."""
    return dict(_leaves(msgspec.to_builtins(config)))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _layers(path: Path) -> list[tuple[str, Tree]]:
    """Read a recipe and its ancestors, the furthest first, each with the origin of its values."""
    chain: list[tuple[str, Tree]] = []
    seen: list[Path] = []
    named_by: Path | None = None
    argument, path = path, find_recipe(path)
    while True:
        identity = _identity(path)
        if identity in seen:
            circle = " → ".join(link.name for link in [*seen[seen.index(identity) :], identity])
            raise ConfigError(f"`extends` in {named_by}: expected a chain that ends, got the circle {circle}")
        seen.append(identity)
        tree = _read_yaml(path, named_by=named_by)
        chain.append((str(argument) if named_by is None else f"extends {path.name}", tree))
        parent = tree.pop("extends", None)
        if parent is None:
            return chain[::-1]
        if not isinstance(parent, str):
            raise ConfigError(f"`extends` in {path}: expected one path, got {parent!r}")
        named_by, path = path, _parent(path, parent)


def _parent(path: Path, extended: str) -> Path:
    """A file relative to the recipe that extends it, or a packaged recipe by its name."""
    beside = path.parent / extended
    packaged = packaged_recipes().get(extended)
    return packaged if packaged is not None and not beside.is_file() else beside


def _identity(path: Path) -> Path:
    try:
        return path.resolve()
    except (
        OSError,
        RuntimeError,
    ) as error:  # RuntimeError: circular links before Python 3.13.
        raise ConfigError(f"{path}: expected a readable recipe file: {error}") from error


def _read_yaml(path: Path, *, named_by: Path | None) -> Tree:
    because = f" (named by `extends` in {named_by})" if named_by else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: expected a recipe file, found nothing there{because}{_close_recipes(path)}"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable recipe file{because}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text{because}: {error}") from error
    tree = _parse_yaml(text, where=str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected fields like `name: mine`, got {shown(tree)}{because}")
    return tree


def _parse_yaml(text: str, *, where: str) -> Any:
    try:
        # The loader is a safe one; see `_StrictLoader`.
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"{where}: expected valid YAML: {reason}") from error


class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Safe YAML without its surprises: `3e-4` is a number, `no` is text, `010` is not 8, duplicate keys are refused."""

    yaml_implicit_resolvers: typing.ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(
                    None, None, f"expected a field name, got {getattr(key, 'value', key)!r}", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"field `{key.value}` is there twice", key.start_mark
                )
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


for _tag, _pattern, _first in (
    ("null", r"~|null|", ["~", "n", ""]),
    ("bool", r"true|false", list("tf")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf|\.nan)",
        list("-+.0123456789"),
    ),
):
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _parse_override(override: str) -> Tree:
    """`actor.learning_rate=3e-4` → `{"actor": {"learning_rate": 0.0003}}`."""
    field, equals, text = str(override).partition("=")
    names = field.split(".")
    if not equals or not all(name.isidentifier() for name in names):
        raise ConfigError(
            f"{COMMAND_LINE}: expected overrides like `actor.learning_rate=3e-4`, got `{override}`"
        )
    value = _parse_yaml(text, where=f"{COMMAND_LINE}, `{override}`")
    for name in reversed(names):
        value = {name: value}
    tree: Tree = value
    return tree


def _merge(base: Tree, layer: Mapping[str, Any], *, origin: str, origins: Origins, prefix: str = "") -> None:
    """Merge `layer` into `base` in place: sections are merged by field, other values are replaced."""
    for key, value in layer.items():
        field = f"{prefix}{key}"
        if isinstance(value, dict):
            if not isinstance(base.get(key), dict):
                base[key] = {}
                origins.pop(field, None)
            origins.setdefault(field, origin)
            _merge(base[key], value, origin=origin, origins=origins, prefix=f"{field}.")
            continue
        for replaced in [name for name in origins if name.startswith(f"{field}.")]:
            del origins[replaced]
        base[key] = value
        origins[field] = origin


def _convert(tree: Tree, *, origins: Mapping[str, str], where: str | None = None) -> Config:
    _refuse_unknown_fields(tree, Config, origins=origins, where=where)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explained(str(error), tree, origins=origins, where=where)) from None


def _explained(message: str, tree: Tree, *, origins: Mapping[str, str], where: str | None) -> str:
    """Add the value and its origin to a message of msgspec."""
    expected, _, location = message.partition(" - at `$.")
    field = location.rstrip("`")
    if not field:
        return f"{_place(None, origins, where)}: {expected[0].lower()}{expected[1:]}"
    names = re.findall(r"[^.\[\]]+", field)
    value: Any = tree
    for name in names:
        value = value[int(name)] if isinstance(value, list) else value[name]
    if expected.startswith("Object contains unknown field"):
        return f"`{field}` ({_place(field.partition('[')[0], origins, where)}): no such field {expected.split()[-1]}"
    if expected.startswith("Invalid enum value"):
        choices = typing.get_args(_type_at(names))
        expected = f"expected one of {', '.join(map(str, choices))}"
        if field == "algorithm.name":
            expected += " or the path of a custom algorithm"
    else:
        kinds = re.findall(r"\w+", expected.partition(", got")[0])[1:]
        expected = f"expected {' or '.join(_PLAIN_WORDS.get(kind, kind) for kind in kinds)}"
    return f"`{field}` ({_place(field.partition('[')[0], origins, where)}): {expected}, got {shown(value)}"


_PLAIN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a section with fields",
    "array": "a list",
    "null": "null",
}


def _type_at(names: Sequence[str]) -> Any:
    annotation: Any = Config
    for name in names:
        section = _section_of(annotation)
        if section is None:
            break
        annotation = typing.get_type_hints(section).get(name)
    return annotation


def _refuse_unknown_fields(
    tree: Mapping[str, Any],
    section: type[msgspec.Struct],
    *,
    origins: Mapping[str, str],
    where: str | None,
    prefix: str = "",
) -> None:
    hints = typing.get_type_hints(section)
    for key, value in tree.items():
        field = f"{prefix}{key}"
        if key not in hints:
            place = _place(field, origins, where)
            raise ConfigError(f"`{field}` ({place}): no such field{_suggestion(key, section, prefix=prefix)}")
        inner = _section_of(hints[key])
        if inner is not None and isinstance(value, dict):
            _refuse_unknown_fields(value, inner, origins=origins, where=where, prefix=f"{field}.")


def _section_of(annotation: Any) -> type[msgspec.Struct] | None:
    """Struct of an annotation `Section` or `Section | None`; None for a plain value."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return option
    return None


def _suggestion(name: str, section: type[msgspec.Struct], *, prefix: str) -> str:
    """Suggest similar fields: of the same section by spelling, of other sections by name."""
    here = section.__struct_fields__
    near = [f"{prefix}{match}" for match in difflib.get_close_matches(name, here, n=1)]
    every = list(_every_field(Config))
    near = near or [field for field in every if field.rsplit(".", 1)[-1] == name]
    near = near or [
        field
        for match in difflib.get_close_matches(name, {field.rsplit(".", 1)[-1] for field in every}, n=1)
        for field in every
        if field.rsplit(".", 1)[-1] == match
    ]
    if near:
        return f"; did you mean {' or '.join(f'`{field}`' for field in near)}?"
    return f"; expected one of {', '.join(sorted(here))}"


def _every_field(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for name, annotation in typing.get_type_hints(section).items():
        inner = _section_of(annotation)
        yield f"{prefix}{name}"
        if inner is not None:
            yield from _every_field(inner, f"{prefix}{name}.")


def named_origin(origin: str) -> str:
    """Format an origin for a message."""
    return origin if origin in (COMMAND_LINE, DEFAULT) else f"from {origin}"


def _place(field: str | None, origins: Mapping[str, str], where: str | None) -> str:
    """Origin of a field, or of the nearest enclosing section with a known origin."""
    while field:
        if field in origins:
            return named_origin(origins[field])
        field = field.rpartition(".")[0]
    return where or next(iter(origins.values()), "recipe")


def shown(value: Any) -> str:
    """Format a value as in a recipe, shortened to 80 characters."""
    match value:
        case dict():
            text = "a section"
        case list() | tuple():
            text = f"[{', '.join(map(str, value))}]"
        case str():
            text = f"'{value}'"
        case bool():
            text = str(value).lower()
        case None:
            text = "nothing"
        case _:
            text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
