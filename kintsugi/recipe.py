"""From a recipe file and the command line to a `Config`, remembering where every value came from.

A recipe is YAML. `extends: other.yaml` (relative to the file) takes everything from another recipe first; dotted
overrides `actor.learning_rate=3e-4` come last. Whether the values make sense together is `validation.py`'s question.
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

from kintsugi.config import (
    AlgorithmSection,
    Config,
    CriticSection,
    DataSection,
    ReferenceSection,
    SourceSection,
)
from kintsugi.errors import ConfigError, StorageError
from kintsugi.stages import stages

COMMAND_LINE = "command line"
DEFAULT = "default"
PYTHON = "Python"

Tree = dict[str, Any]
Origins = dict[str, str]
S = TypeVar("S", bound=SourceSection)


class Resolved(msgspec.Struct, frozen=True):
    """A configuration and the origin of each of its values: `{"actor.workers": "recipes/mine.yaml", …}`."""

    config: Config
    origins: Origins


def load(path: str | Path, overrides: Sequence[str] = ()) -> Resolved:
    """Read a recipe with everything it extends, apply the overrides, and convert strictly."""
    tree: Tree = {}
    origins: Origins = {}
    for origin, layer in _layers(Path(path)):
        _merge(tree, layer, origin=origin, origins=origins)
    for override in overrides:
        _merge(tree, _parse_override(override), origin=COMMAND_LINE, origins=origins)
    return _resolved(tree, origins)


def given(config: Config, overrides: Sequence[str] = ()) -> Resolved:
    """A configuration that was built in Python, checked as strictly as a file; overrides have the last word."""
    tree: Tree = msgspec.to_builtins(config, enc_hook=str)
    untouched = fields_of(Config(name=""))
    origins = {field: PYTHON for field, value in _leaves(tree) if value != untouched.get(field)}
    for override in overrides:
        _merge(tree, _parse_override(override), origin=COMMAND_LINE, origins=origins)
    return _resolved(tree, origins)


def rollout_only(resolved: Resolved, *, steps: int) -> Resolved:
    """The same run without learning: as many steps in which completions are sampled, scored and kept."""
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


def _resolved(tree: Tree, origins: Origins) -> Resolved:
    config = _convert(tree, origins=origins)
    for field in fields_of(config):
        origins.setdefault(field, DEFAULT)
    return Resolved(config, {field: origins[field] for field in fields_of(config)})


def dump(config: Config, path: Path) -> None:
    """Write `config.yaml` as run: every value, defaults included; `load_config` gives back an equal `Config`."""
    text = yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False, allow_unicode=True, width=120)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def load_config(path: Path) -> Config:
    """Read what `dump` wrote. Strict: a field that this version does not know is refused."""
    return _convert(_read_yaml(path, named_by=None), origins={}, where=str(path))


def anchored(config: Config) -> Config:
    """The same configuration with absolute paths: processes and a later `resume` may run in other folders."""
    replace = msgspec.structs.replace
    for name in ("model", "critic", "reference", "reward_model"):
        section = getattr(config, name)
        if section is not None and section.path is not None:
            folder = replace(section, path=str(Path(section.path).resolve()))
            config = replace(config, **{name: folder})
    config = replace(config, data=_anchored_data(config.data))
    if config.run_dir is not None:
        config = replace(config, run_dir=str(Path(config.run_dir).resolve()))
    rewards = tuple(map(_anchored_reward, config.algorithm.reward))
    return replace(config, algorithm=replace(config.algorithm, reward=rewards))


def _anchored_reward(reward: str) -> str:
    """`rewards.py:brevity` names a file; `package.module.brevity` does not."""
    file, colon, name = reward.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if colon else reward


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
    """A source with its path, if it names one, made absolute: `folder:split` and `stream:PATH` too."""
    if source in ("arithmetic", "arithmetic:words", "arithmetic:products", "stream:-") or source.startswith(
        ("reasoning_gym:", "hf:")
    ):
        return source
    if source.startswith("stream:"):
        return f"stream:{Path(source.removeprefix('stream:')).resolve()}"
    return str(Path(source).resolve())


def fields_of(config: Config) -> dict[str, Any]:
    """Dotted field → value, in the order of declaration; an absent section is one field that is None."""
    return dict(_leaves(msgspec.to_builtins(config)))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _layers(path: Path) -> list[tuple[str, Tree]]:
    """The recipe's chain, furthest ancestor first, each with the origin that its values will show."""
    chain: list[tuple[str, Tree]] = []
    seen: list[Path] = []
    named_by: Path | None = None
    while True:
        identity = _identity(path)
        if identity in seen:
            circle = " → ".join(link.name for link in [*seen[seen.index(identity) :], identity])
            raise ConfigError(f"`extends` in {named_by}: expected a chain that ends, got the circle {circle}")
        seen.append(identity)
        tree = _read_yaml(path, named_by=named_by)
        chain.append((str(path) if named_by is None else f"extends {path.name}", tree))
        parent = tree.pop("extends", None)
        if parent is None:
            return chain[::-1]
        if not isinstance(parent, str):
            raise ConfigError(f"`extends` in {path}: expected one path, got {parent!r}")
        named_by, path = path, path.parent / parent


def _identity(path: Path) -> Path:
    try:
        return path.resolve()
    except (
        OSError,
        RuntimeError,
    ) as error:  # RuntimeError is what a circle of links gives before Python 3.13.
        raise ConfigError(f"{path}: expected a readable recipe file: {error}") from error


def _read_yaml(path: Path, *, named_by: Path | None) -> Tree:
    because = f" (named by `extends` in {named_by})" if named_by else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: expected a recipe file, found nothing there{because}") from None
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
    """Safe YAML, less its surprises: `3e-4` is a number, `no` is a word, `010` is not eight, keys come once."""

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
    """Lay `layer` over `base` in place: sections are merged field by field, anything else is replaced."""
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
    """msgspec says what it expected and where; add the value and the file or line it came from."""
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
    """The struct behind `Section` or `Section | None`; None for a plain value."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            return option
    return None


def _suggestion(name: str, section: type[msgspec.Struct], *, prefix: str) -> str:
    """Fields that may have been meant: of the same section by spelling, of any other by name."""
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
    """How an origin reads in a sentence."""
    return origin if origin in (COMMAND_LINE, DEFAULT) else f"from {origin}"


def _place(field: str | None, origins: Mapping[str, str], where: str | None) -> str:
    """Where a field was given: the nearest enclosing thing whose origin is known."""
    while field:
        if field in origins:
            return named_origin(origins[field])
        field = field.rpartition(".")[0]
    return where or next(iter(origins.values()), "recipe")


def shown(value: Any) -> str:
    """A value as the user wrote it, cut to a readable length."""
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
