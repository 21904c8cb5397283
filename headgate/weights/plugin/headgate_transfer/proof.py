"""Compare the tensors of a version with what a worker holds in memory, bit by bit.

Owns the places: where in a worker's memory each tensor of the checkpoint lies. A place is found by its contents at the first
comparison, since engines merge, shard and rename tensors, and is kept for the next versions. Invariants: a tensor counts as held
only if every number of it, in the dtype that the worker keeps, is at each of its places; nothing in memory changes. Weights that
the worker quantized itself are compared with the same rounding of what was published (`QuantizedBlock`). A tensor in yet another
form (quantized by blocks, transposed) is never found: it is `missing`, which proves and refutes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

PIECE = 2**24
"""The bytes that one hash covers, as in the manifest of a version; the last piece of a tensor is shorter."""
_MOST_OFFSETS = 8
"""The most offsets at which one tensor is compared with one block of memory: more of them distinguish nothing."""
_SLACK = 1e-5
"""The share by which rounding in float32 may move the largest number of a row beyond the range of its codes."""
_AT_ONCE = 2**24
"""The numbers that are compared in one piece, so that an engine whose memory is full needs little more."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of numbers in memory: `values` has shape (rows, width)."""

    values: Tensor

    @property
    def width(self) -> int:
        return self.values.shape[1]

    def __len__(self) -> int:
        return len(self.values)

    def part(self, start: int, end: int) -> Block:
        """Return the rows from `start` to `end`."""
        return Block(self.values[start:end])

    def equal(self, rows: Tensor) -> Tensor:
        """Return for each row whether its numbers are those of `rows`, in the dtype that is held; -0 equals 0, as products give
        either."""
        other = rows.to(self.values.device, self.values.dtype)
        if self.values.itemsize > 1:
            return (self.values == other).all(1)
        return (_bytes(self.values) == _bytes(other)).all(1)


@dataclass(frozen=True, slots=True)
class QuantizedBlock(Block):
    """Rows of float8 codes that stand for `values * scale`.

    A row is equal if its codes are those of the published numbers over the held scale, and none of these is beyond the codes'
    range: then the worker computes with the published numbers but for the rounding of float8.
    """

    scale: Tensor
    """Shape (rows, 1), or (1, 1) for all rows."""
    dtype: torch.dtype
    """The dtype in which the worker loaded the numbers before it rounded them."""

    def part(self, start: int, end: int) -> QuantizedBlock:
        scale = self.scale if len(self.scale) == 1 else self.scale[start:end]
        return QuantizedBlock(self.values[start:end], scale, self.dtype)

    def equal(self, rows: Tensor) -> Tensor:
        numbers = rows.to(self.values.device, self.dtype)
        scaled, held = numbers / self.scale, _bytes(self.values)
        found = held == _bytes(scaled.to(self.values.dtype))
        if (
            len(self.scale) == 1
        ):  # vLLM's kernel for one scale multiplies, which rounds a midpoint the other way
            found |= held == _bytes((numbers * self.scale.reciprocal()).to(self.values.dtype))
        largest = torch.finfo(self.values.dtype).max * (1 + _SLACK)
        return (found & (scaled.abs() <= largest)).all(1)


class TensorPart(NamedTuple):
    """Where a part of a tensor lies: `rows` rows from `row` on, and the columns of `share`, at `start` in the block `block`."""

    block: str
    start: int
    row: int
    rows: int
    share: tuple[int, int]
    """Which of how many equal parts of the columns."""


class _Span(NamedTuple):
    """Rows of a block that may be those of a tensor."""

    start: int
    row: int
    rows: int
    equal: int
    """The rows whose numbers are equal."""


@dataclass
class Comparison:
    """What one worker reads and holds of a version."""

    hashes: dict[str, list[str]] = field(default_factory=dict)
    """BLAKE3 (hexadecimal) of each `PIECE` bytes of the tensors that were read, by their names in the checkpoint."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Tensors whose memory has other numbers, and where."""
    missing: list[str] = field(default_factory=list)
    """Tensors that were never found in memory."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


class Places:
    """The memory of one worker, `shards` of which hold a model together."""

    def __init__(self, shard: int = 0, shards: int = 1) -> None:
        self._shard, self._shards = shard, shards
        self._places: dict[str, list[TensorPart]] = {}

    def compare(
        self, memory: Mapping[str, Tensor | Block], version: Iterable[tuple[str, Tensor]]
    ) -> Comparison:
        """Compare every tensor of a version with the blocks of memory, by name.

        `memory`: tensors of any shape on one device; `version`: the checkpoint's tensors, on the CPU, one after the other.
        """
        blocks = {
            name: held if isinstance(held, Block) else Block(rows_of(held)) for name, held in memory.items()
        }
        result, found = Comparison(), dict[str, list[TensorPart]]()
        for name, tensor in version:
            result.hashes[name] = _hashes(tensor)
            rows = rows_of(tensor)
            if known := self._places.get(name):
                differing = next((p for p in known if self._differs(blocks.get(p.block), rows, p)), None)
                if differing is not None:
                    result.wrong[name] = f"{differing.block} holds other numbers than were published"
                continue
            found[name] = self._sure(name, rows, blocks)
            if not found[name]:
                result.missing.append(name)
            elif partial := next((p for p in found[name] if self._differs(blocks[p.block], rows, p)), None):
                result.wrong[name] = f"{partial.block} holds a part of other numbers than were published"
        self._remember({name: places for name, places in found.items() if name not in result.wrong})
        return result

    def _sure(self, name: str, rows: Tensor, blocks: Mapping[str, Block]) -> list[TensorPart]:
        """Return the places of a tensor. If the block of its own name holds all of it, one that only resembles it is none: the
        norms of a model that has hardly learned have few different numbers."""
        places = [place for key in blocks for place in self._find(name, rows, key, blocks[key])]
        equal = [place for place in places if not self._differs(blocks[place.block], rows, place)]
        whole = any(_same_name(name, p.block) and p.rows == len(rows) and p.share == (0, 1) for p in equal)
        return equal if whole else places

    def _remember(self, found: Mapping[str, list[TensorPart]]) -> None:
        """Keep the places of one tensor only that are its only ones in a block; equal tensors and rows distinguish nothing."""
        taken = [(place.block, place.start) for places in self._places.values() for place in places]
        claims = Counter((place.block, place.start) for places in found.values() for place in places)
        claims.update(taken)
        for name, places in found.items():
            blocks = Counter(place.block for place in places)
            own = [
                p
                for p in places
                if blocks[p.block] == 1 and (claims[p.block, p.start] == 1 or _same_name(name, p.block))
            ]
            if own:
                self._places[name] = own

    def _find(self, name: str, rows: Tensor, key: str, block: Block) -> Iterator[TensorPart]:
        """Yield the places of a tensor in a block of which at least half of the rows are equal; in the block of its own name
        also one that differs in all."""
        if not _may_hold(name, key):
            return
        for share in dict.fromkeys([(0, 1), (self._shard, self._shards)]):
            width = rows.shape[1] // share[1]
            if width != block.width:
                continue
            part = rows[:, share[0] * width :][:, :width]
            spans = [
                span for offset in self._offsets(part, block) if (span := self._span(part, block, offset))
            ]
            if not spans and _same_name(name, key) and len(rows) == len(block) and share == (0, 1):
                spans = [_Span(0, 0, len(rows), 0)]
            # Rows that repeat make a tensor resemble its own neighborhood: what is equal most counts.
            most = max((span.equal for span in spans), default=0)
            best = [span for span in spans if span.equal == most][:_MOST_OFFSETS]
            yield from (TensorPart(key, span.start, span.row, span.rows, share) for span in best)

    def _offsets(self, rows: Tensor, block: Block) -> list[int]:
        """Return at which rows of a block a tensor may begin, by a few of its rows; negative where the block has later rows."""
        count = 3 * self._shards
        candidates = dict[int, None]()
        for anchor in sorted({len(rows) * i // count for i in range(count)} | {len(rows) - 1}):
            at = _equal_rows(block, rows[anchor : anchor + 1].expand(len(block), -1)).nonzero().flatten()
            candidates |= dict.fromkeys(position - anchor for position in at[:_MOST_OFFSETS].tolist())
        return list(candidates)

    def _span(self, rows: Tensor, block: Block, offset: int) -> _Span | None:
        """Return the rows that a tensor and a block have in common at an offset.

        None if they are not the whole tensor, or of several shards at least half a share, or if most rows differ.
        Rows that repeat count once.
        """
        row, start = max(0, -offset), max(0, offset)
        count = min(len(rows) - row, len(block) - start)
        if count <= 0 or (self._shards == 1 and count < len(rows)):
            return None
        equal = _equal_rows(block.part(start, start + count), rows[row : row + count])
        if self._shards > 1:  # the block goes on with rows of another tensor
            at = equal.nonzero().flatten()
            first, last = (int(at[0]), int(at[-1])) if len(at) else (0, -1)
            start, row, count, equal = start + first, row + first, last - first + 1, equal[first : last + 1]
        changed = _changes(rows[row : row + count])
        if count * 2 * self._shards < len(rows) or int(equal[changed].sum()) * 2 < int(changed.sum()):
            return None
        return _Span(start, row, count, int(equal.sum()))

    @staticmethod
    def _differs(block: Block | None, rows: Tensor, place: TensorPart) -> bool:
        index, shares = place.share
        width = rows.shape[1] // shares
        mine = rows[place.row : place.row + place.rows, index * width : (index + 1) * width]
        if block is None or block.width != width or len(block) < place.start + len(mine):
            return True
        return not bool(_equal_rows(block.part(place.start, place.start + len(mine)), mine).all())


def compare_adapter(
    loaded: Mapping[str, Tensor], version: Mapping[str, Tensor], scaling: float
) -> Comparison:
    """Compare the factors of an adapter in memory, whose `lora_B` are multiplied by `scaling`, with those of a version.

    Names agree from the number of the layer on. Factors of experts, which engines merge, are `missing`.
    """
    by_layer = {_from_layer(name): tensor for name, tensor in loaded.items()}
    result = Comparison(hashes={name: _hashes(tensor) for name, tensor in version.items()})
    for name, tensor in version.items():
        mine = by_layer.get(_from_layer(name))
        if mine is None and ".experts." in name:
            result.missing.append(name)
        elif mine is None:
            result.wrong[name] = "the worker does not hold it"
        else:
            wanted = tensor.to(mine.device, mine.dtype, copy=True)
            wanted = wanted.mul_(scaling) if ".lora_B." in name else wanted
            if mine.shape != wanted.shape or not torch.equal(mine, wanted):
                result.wrong[name] = "the worker holds other numbers than were published"
    return result


def _from_layer(name: str) -> str:
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 3)
    return ".".join(parts[max(0, first) :])


def rows_of(tensor: Tensor) -> Tensor:
    """Return a matrix of a tensor's rows; a vector is a column."""
    tensor = tensor.detach()
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim > 1 else tensor.reshape(-1, 1)


def _bytes(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def _equal_rows(block: Block, rows: Tensor) -> Tensor:
    """Return for each row of a block whether it is equal to that of `rows`."""
    step, found = max(1, _AT_ONCE // max(1, block.width)), list[Tensor]()
    for start in range(0, len(block), step):
        found.append(block.part(start, start + step).equal(rows[start : start + step]))
    return torch.cat(found) if found else torch.ones(0, dtype=torch.bool)


def _changes(rows: Tensor) -> Tensor:
    """Return for each row whether it differs from the one before: rows that repeat distinguish no places."""
    return torch.cat([torch.ones(1, dtype=torch.bool), ~(rows[1:] == rows[:-1]).all(1)])


def _hashes(tensor: Tensor) -> list[str]:
    data = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return [blake3(data[at : at + PIECE]).hexdigest() for at in range(0, len(data), PIECE)]


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdigit()]


def _may_hold(name: str, block: str) -> bool:
    """Return whether a block is of the layer of a tensor: its name has the same numbers, or fewer (experts are merged)."""
    mine, its = _numbers(name), _numbers(block)
    return mine[: len(its)] == its and (bool(its) or not mine)


def _same_name(name: str, block: str) -> bool:
    """Return whether a block is called as a tensor is, but for the modules around it."""
    return name.split(".")[-2:] == block.split(".")[-2:] and _numbers(name) == _numbers(block)
