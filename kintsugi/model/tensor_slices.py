"""How a model's parameters are cut into logical tensor slices. Pure: imports no torch.

    attention and MLP:   query, key, value, gate, up by rows (heads, columns of the activation); o, down by columns
    vocabulary:          embedding and output projection by rows
    whole in each slice: norms, biases of o and down, the value head

The number of logical slices is fixed for a run (`actor.logical_slices`) and is what bits depend on. Each slice of a
parameter is a tensor of its own, "model.layers.0.mlp.down_proj.weight#1/4", so that a product has the same shape and
strides whichever rank computes it. Tensor ranks share the slices evenly, in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kintsugi.errors import ModelError
from kintsugi.model.architecture import ModelConfig

_MARK = re.compile(r"(?P<name>[^#]+)#(?P<index>\d+)/(?P<count>\d+)")
_BY_ROWS = re.compile(r"(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.(weight|bias)$")
_BY_COLUMNS = re.compile(r"(o_proj|down_proj)\.weight$")

Extent = tuple[tuple[int, int], ...]
"""Start and stop along each axis of a whole tensor, as in `Piece.slice`."""


@dataclass(frozen=True)
class SliceName:
    """`SliceName.parse("lm_head.weight#1/4") == SliceName("lm_head.weight", 1, 4)`; a whole tensor is slice 0 of 1."""

    name: str
    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, local: str) -> SliceName:
        found = _MARK.fullmatch(local)
        return cls(local) if found is None else cls(found["name"], int(found["index"]), int(found["count"]))

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.name}#{self.index}/{self.count}"


def cut_axis(name: str) -> int | None:
    """Axis along which a parameter is cut; None for one that is whole in each slice.

    >>> cut_axis("model.layers.0.mlp.up_proj.bias"), cut_axis("model.layers.0.mlp.down_proj.weight")
    (0, 1)
    """
    if _BY_ROWS.search(name):
        return 0
    return 1 if _BY_COLUMNS.search(name) else None


def slice_names(name: str, *, slices: range, count: int) -> list[str]:
    """Names of some slices of a parameter, or its own if it is whole in each.

    >>> slice_names("lm_head.weight", slices=range(2, 4), count=4)
    ['lm_head.weight#2/4', 'lm_head.weight#3/4']
    """
    if cut_axis(name) is None:
        return [name]
    return [str(SliceName(name, index, count)) for index in slices]


def extent(where: SliceName, shape: tuple[int, ...]) -> Extent:
    """Range of a slice in the whole tensor of this shape. Sizes differ by at most one where they do not come out even.

    >>> extent(SliceName("lm_head.weight", 1, 2), (7, 16))
    ((3, 7), (0, 16))
    """
    axis = cut_axis(where.name) if where.count > 1 else None
    return tuple(
        (size * where.index // where.count, size * (where.index + 1) // where.count)
        if number == axis
        else (0, size)
        for number, size in enumerate(shape)
    )


def view(whole: Any, where: SliceName) -> Any:
    """The elements of a slice, as a view of the whole array; by columns it is not contiguous."""
    return whole[tuple(slice(*each) for each in extent(where, tuple(whole.shape)))]


def slice_shape(where: SliceName, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`slice_shape(SliceName("lm_head.weight", 1, 2), (7, 16)) == (4, 16)`."""
    return tuple(stop - start for start, stop in extent(where, shape))


def slice_shapes(
    shapes: Mapping[str, tuple[int, ...]], *, slices: range, count: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of some slices of a model's parameters, by their own names."""
    return {
        local: slice_shape(SliceName.parse(local), shape)
        for name, shape in shapes.items()
        for local in slice_names(name, slices=slices, count=count)
    }


def cut(whole: Mapping[str, Any], *, slices: range, count: int) -> dict[str, Any]:
    """Views of some slices of whole tensors, by their own names."""
    return {
        local: view(array, SliceName.parse(local))
        for name, array in whole.items()
        for local in slice_names(name, slices=slices, count=count)
    }


def fill(whole: Mapping[str, Any], slices: Mapping[str, Any]) -> None:
    """Copy slices to their places in whole tensors of the same memory; the inverse of `cut`."""
    for local, array in slices.items():
        where = SliceName.parse(local)
        view(whole[where.name], where)[...] = array


def join(name: str, shape: tuple[int, ...], slices: Mapping[str, Any]) -> Any:
    """A whole tensor from all of its slices."""
    whole = next(iter(slices.values())).new_empty(shape)
    fill({name: whole}, slices)
    return whole


def join_all(slices: Mapping[str, Any], *, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Whole tensors from slices of these; one that was not cut is not copied."""
    by_name: dict[str, dict[str, Any]] = {}
    for local, array in slices.items():
        by_name.setdefault(SliceName.parse(local).name, {})[local] = array
    return {
        name: own[name] if name in own else join(name, shapes[name], own) for name, own in by_name.items()
    }


@dataclass(frozen=True)
class ModelSlices:
    """Which slices of every parameter a rank has: `ModelSlices(range(2, 4), 4)` are the last two of four."""

    own: range = range(1)
    count: int = 1

    @property
    def is_cut(self) -> bool:
        return self.count > 1

    def shapes(self, whole: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the rank's parameters, by their own names: first those that are cut."""
        if not self.is_cut:
            return whole
        in_order = dict(sorted(whole.items(), key=lambda item: cut_axis(item[0]) is None))
        return slice_shapes(in_order, slices=self.own, count=self.count)

    def cut(self, weights: Mapping[str, Any]) -> Mapping[str, Any]:
        """Slices of weights that are whole; those that are slices already remain as they are."""
        if not self.is_cut or any(SliceName.parse(name).count > 1 for name in weights):
            return weights
        return cut(weights, slices=self.own, count=self.count)


def check_slices(config: ModelConfig, count: int) -> None:
    """Raise an error unless the model can be cut into this many slices."""
    if count < 1 or count & (count - 1):
        raise ModelError(f"expected a number of logical slices that is a power of two, got {count}")
    for name in ("num_kv_heads", "num_heads", "intermediate_size"):
        if getattr(config, name) % count:
            raise ModelError(
                f"expected model field `{name}` divisible by the number of logical slices {count}, "
                f"got {getattr(config, name)}"
            )
    if config.vocab_size < count:
        raise ModelError(f"expected a vocabulary of at least {count} tokens, got {config.vocab_size}")


def slices_of(tensor: int, *, tensors: int, count: int) -> range:
    """Logical slices of one tensor rank: `slices_of(1, tensors=2, count=4) == range(2, 4)`.

    Both numbers are powers of two, so that the slices of a rank are a subtree of the binary tree of their sum.
    """
    assert count % tensors == 0, f"{count} slices are not shared evenly by {tensors} ranks"
    width = count // tensors
    return range(tensor * width, (tensor + 1) * width)
