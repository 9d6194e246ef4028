"""A model as drafter: beam search over a smaller checkpoint, or over some of the target's own layers (AdaServe, §4.3).

One forward pass per depth serves all sequences that draft. The first runs the tokens that came out since a sequence's
last draft (and a part of its prompt, as long as the drafter has not seen all of it); each later one the last layer of
every tree, whose nodes see their sequence and their ancestors by the masks of verification. A path's probability is the
product of the model's softmax along it; of what may follow a layer the `width` most probable nodes are the next.

The paper takes these products as they are. Of a draft model that is surer than it is right (an untrained one, above
all) that makes a policy verify what never comes out: `adaserve` with 2 layers of 30 served 14 tokens/s, a server
without drafts 101. So, after the first verified nodes, a tree says for each step the share of such steps that was right
(`calibration`).

The drafter's KV lies in blocks of its own, as many as the target's and some for trees, in its own shape: `layers` of 30
take `layers` / 30 of `kv_gib`, beside it. It holds committed tokens; that of a tree is given back with the draft. Where
blocks run out the sequence that drafted longest ago loses its own, and is read again when it drafts next.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rubato.core.plan import Batch, Entry, Limits, Tree
from rubato_torch.drafters import NO_DRAFT, Draft, Drafter, Wanted
from rubato_torch.drafters.calibration import REFIT, Calibration
from rubato_torch.model import Model, bytes_per_token
from rubato_torch.model_config import Config, load_config
from rubato_torch.model_folder import folder_of
from rubato_torch.tokenizer import vocabulary
from rubato_torch.trees import Candidates
from rubato_torch.weights import load_weights

CHUNK = 512  # tokens of prompts, of all sequences together, that the drafter reads in one step at most
IN_STEP = 16  # a sequence with more tokens that the drafter has not seen is one whose prompt is being read
EDGES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)  # bins of the calibration
SPARE = 2  # blocks for each sequence of a batch, for its tree: 32 nodes at 16 tokens a block

log = logging.getLogger(__name__)


@runtime_checkable
class OfTarget(Drafter, Protocol):
    """One that runs a model beside the target's, or parts of the target."""

    def attach(self, config: Config, folder: Path, limits: Limits) -> None:
        """Called when the engine is made: the target's configuration, its folder, and its bounds. Raises ValueError for
        a target that it cannot draft for."""
        ...

    def prepare(self, target: Model) -> None:
        """Called on the engine's own thread at each start, and after a failed step: load weights, forget sequences."""
        ...

    def release(self) -> None:
        """The engine is closed: give back weights and memory."""
        ...


class ModelDrafter:
    """An `OfTarget` that runs a model.

    checkpoint: a smaller model of the target's vocabulary, as `Engine` takes one (a Hugging Face folder, a GGUF file or
    "bundled"), in the engine's dtype on its device. layers: numbers of the target's own layers instead, in the order in
    which they run, between its embedding and its final norm and head: no further weights. Raises ValueError unless it
    is given one of the two, FileNotFoundError for a checkpoint that is not there.
    """

    def __init__(self, checkpoint: str | Path | None = None, layers: Sequence[int] | None = None) -> None:
        if (checkpoint is None) == (layers is None):
            raise ValueError(
                f"drafter model is given checkpoint {checkpoint!r} and layers {layers!r}: give one of the two, a "
                "smaller checkpoint or numbers of the target's own layers, such as layers: [0, 29]"
            )
        self._layers: tuple[int, ...] | None = None
        if layers is not None:
            whole = isinstance(layers, list | tuple) and all(type(layer) is int for layer in layers)
            if not whole or not layers:
                raise ValueError(f"layers are {layers!r}: give a list of whole numbers, such as [0, 29]")
            self._layers = tuple(layers)
        self._folder = None if checkpoint is None else folder_of(checkpoint)[0]
        self._config: Config | None = None
        self._vocab = 0
        self._limits: Limits | None = None
        self._target: Model | None = None
        self._model: Model | None = None
        self._seqs: OrderedDict[str, _Read] = OrderedDict()  # the one that drafted longest ago first
        self._free: list[int] = []
        self.calibration = Calibration(EDGES, [(low + high) / 2.0 for low, high in pairwise(EDGES)])

    def attach(self, config: Config, folder: Path, limits: Limits) -> None:
        """The target's configuration, its folder, and what its batches and sequences are bounded by. Raises ValueError
        for a checkpoint that has another vocabulary, or layers that the target does not have."""
        if self._layers is not None:
            if beyond := [layer for layer in self._layers if not 0 <= layer < config.layers]:
                raise ValueError(
                    f"drafter model: layers {beyond} are not the target's, which has 0 to {config.layers - 1}"
                )
            own = replace(
                config, layers=len(self._layers), windows=tuple(config.windows[layer] for layer in self._layers)
            )
        else:
            assert self._folder is not None
            own = load_config(self._folder)
            own = own.within(min(own.context, limits.max_model_len))
            _check_vocabulary(self._folder, own, folder, config)
        self._config, self._limits, self._vocab = own, limits, min(own.vocab, config.vocab)

    @torch.inference_mode()
    def prepare(self, target: Model) -> None:
        """Load what is to be loaded, preallocate KV, and forget every sequence."""
        assert self._config is not None, "attach comes first"
        assert self._limits is not None
        config, limits = self._config, self._limits
        if self._model is None or self._target is not target:
            weights, embed = target.weights, target.weights.embed
            if self._layers is not None:
                weights = replace(weights, layers=tuple(weights.layers[layer] for layer in self._layers))
            else:
                assert self._folder is not None
                weights = load_weights(self._folder, config, embed.dtype, embed.device)
            blocks = limits.kv_blocks + SPARE * limits.max_num_seqs
            self._model = Model(config, weights, blocks, limits.block_size, 0, target.most_threads)
            self._target = target
            mib = blocks * limits.block_size * bytes_per_token(config, embed.dtype) / 2**20
            log.info("drafter: %d layers, KV of %d blocks, %.0f MiB beside the target's", config.layers, blocks, mib)
        self._model.kv.zero_()
        self._model.warm_up()
        self._seqs.clear()
        self._free = list(range(self._model.kv.shape[1]))

    def release(self) -> None:
        """Give back weights and KV."""
        self._model = self._target = None
        self._seqs.clear()
        self._free = []

    @torch.inference_mode()
    def draft(self, wanted: Sequence[Wanted]) -> list[Draft]:
        assert self._model is not None, "prepare comes first"
        assert self._target is not None
        self._model.use_threads(self._target.threads)
        beams = {want.seq: beam for want in wanted if (beam := self._beam(want)) is not None}
        self._read(beams)
        growing = [beam for beam in beams.values() if beam.ready]
        while growing := [beam for beam in growing if beam.deeper]:
            self._expand(growing)
        sure = self.calibration if self.calibration.observed >= REFIT else None
        for beam in beams.values():
            self._shrink(beam.read)
            beam.read.draft, beam.read.steps = beam.drafted(sure), beam.steps
        return [beams[want.seq].read.draft if want.seq in beams else NO_DRAFT for want in wanted]

    def verified(self, seq: str, draft: Draft, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from what was right. Accepted tokens are read with the next draft, as the token behind them is."""
        read = self._seqs.get(seq)
        if read is None or read.draft != draft:
            return
        right = {-1, *accepted}
        for node in tried:
            if draft.tree.parents[node] in right:
                self.calibration.observe(read.steps[node], node in right)
        read.draft = NO_DRAFT

    def forget(self, seq: str) -> None:
        if (read := self._seqs.pop(seq, None)) is not None:
            self._free += read.blocks

    def _beam(self, want: Wanted) -> _Beam | None:
        """A sequence whose draft begins; None for one that is longer than the drafter's context."""
        assert self._config is not None
        known = self._seqs.get(want.seq)
        if known is not None and known.ids != list(want.tokens[: len(known.ids)]):
            self.forget(want.seq)
            known = None
        if (depth := min(want.depth, self._config.context + 1 - len(want.tokens))) < 1:
            return None
        if known is None:
            known = self._seqs[want.seq] = _Read()
        self._seqs.move_to_end(want.seq)
        if len(known.ids) == len(want.tokens):  # asked again: the last token says what follows
            del known.ids[-1:], known.run[-1:]
        return _Beam(want, known, depth)

    def _read(self, beams: Mapping[str, _Beam]) -> None:
        """Run what the drafter has not seen of each sequence, prompts in chunks; the first layer of those that are
        complete then."""
        entries: list[Entry] = []
        tokens: dict[str, list[int]] = {}
        left = CHUNK
        for beam in sorted(beams.values(), key=lambda beam: beam.unseen):
            read, ids, count = beam.read, beam.want.tokens, beam.unseen
            if count > IN_STEP:
                count = min(count, left)
                left -= count
            start, end = len(read.ids), len(read.ids) + count
            complete = end == len(ids)
            if not count or not self._grow(read, end + (beam.scratch if complete else 0), beams):
                continue
            read.ids += ids[start:end]
            beam.ready = complete
            # ids beyond this vocabulary are no text's: embeddings are padded to round numbers, each model's to its own
            read.run += [id if id < self._vocab else 0 for id in ids[start:end]]
            tokens[beam.want.seq] = read.run
            entries.append(Entry(beam.want.seq, start, count, tuple(read.blocks), complete))
        if entries:
            self._run(entries, tokens, {}, beams)

    def _expand(self, beams: Sequence[_Beam]) -> None:
        """Run the last layer of each tree, and add the next one."""
        entries, trees = [], {}
        for beam in beams:
            first, nodes = beam.layer.start, beam.layer.stop
            start = len(beam.read.ids) + first
            blocks = tuple(beam.read.blocks)
            entries.append(Entry(beam.want.seq, start, nodes - first, blocks, True, tuple(range(nodes))))
            trees[beam.want.seq] = beam.candidates
        tokens = {beam.want.seq: beam.read.run for beam in beams}
        self._run(entries, tokens, trees, {beam.want.seq: beam for beam in beams})

    def _run(
        self,
        entries: Sequence[Entry],
        tokens: Mapping[str, Sequence[int]],
        trees: Mapping[str, Candidates],
        beams: Mapping[str, _Beam],
    ) -> None:
        """One forward pass; each beam grows by what its rows say."""
        assert self._model is not None
        packed = self._model.pack(Batch(tuple(entries)), tokens, trees)
        logits = self._model.forward(packed)
        if not packed.seqs:
            return
        most = min(self._vocab, max(beams[seq].want.width for seq in packed.seqs))
        likely = _most_likely(logits[:, : self._vocab], most)
        row = 0
        for seq in packed.seqs:
            rows = len(beams[seq].layer) or 1
            beams[seq].grow(likely[row : row + rows])
            row += rows

    def _grow(self, read: _Read, tokens: int, busy: Mapping[str, _Beam]) -> bool:
        """Blocks for so many tokens of a sequence, from others that do not draft now if need be; whether they are
        there."""
        assert self._limits is not None
        lacking = self._limits.blocks(tokens) - len(read.blocks)
        while len(self._free) < lacking:
            oldest = next((seq for seq in self._seqs if seq not in busy), None)
            if oldest is None:
                return False
            self.forget(oldest)
        for _ in range(lacking):
            read.blocks.append(self._free.pop())
        return True

    def _shrink(self, read: _Read) -> None:
        """Give back the blocks of its tree."""
        assert self._limits is not None
        keep = self._limits.blocks(len(read.ids))
        self._free += read.blocks[keep:]
        del read.blocks[keep:]


@dataclass(slots=True)
class _Read:
    """What is in the drafter's KV of a sequence: these tokens, in these blocks. run: the ids that it was run with;
    draft, steps: its last draft, and of each node the softmax given its parent."""

    ids: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    draft: Draft = NO_DRAFT
    steps: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Beam:
    """A tree that grows by layers. layer: its last nodes; ready: whether the drafter has read all of the sequence."""

    want: Wanted
    read: _Read
    depth: int
    ready: bool = False
    layer: range = range(0)
    depths: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    paths: list[float] = field(default_factory=list)

    @property
    def unseen(self) -> int:
        return len(self.want.tokens) - len(self.read.ids)

    @property
    def scratch(self) -> int:
        """Nodes whose KV is needed: all but the last layer's."""
        return (self.depth - 1) * self.want.width

    @property
    def deeper(self) -> bool:
        return self.depths[-1] < self.depth

    @property
    def candidates(self) -> Candidates:
        nodes = range(len(self.parents))
        return Candidates(NO_DRAFT, tuple(nodes), tuple(self.tokens), tuple(self.parents), tuple(self.depths))

    def drafted(self, sure: Callable[[float], float] | None) -> Draft:
        """The tree; sure: the share right of steps of a probability, None to take the model at its word."""
        paths = self.paths
        if sure is not None:
            paths = []
            for parent, step in zip(self.parents, self.steps, strict=True):
                paths.append(sure(step) * (paths[parent] if parent >= 0 else 1.0))
        return Draft(Tree(tuple(self.parents), tuple(paths)), tuple(self.tokens))

    def grow(self, likely: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Add the `width` most probable of what may follow the last layer; likely: the most probable tokens behind each
        of its nodes, or behind the sequence where there is no layer yet. Ties go to the node, and its child, that
        comes first."""
        before = [(node, self.paths[node]) for node in self.layer] or [(-1, 1.0)]
        found = [
            (path * step, node, token, step)
            for (node, path), steps in zip(before, likely, strict=True)
            for token, step in steps[: self.want.width]
        ]
        found.sort(key=lambda one: -one[0])
        first, depth = len(self.parents), self.depths[-1] + 1 if self.depths else 1
        for path, node, token, step in found[: self.want.width]:
            self.parents.append(node)
            self.tokens.append(token)
            self.steps.append(step)
            self.paths.append(path)
            self.depths.append(depth)
        self.layer = range(first, len(self.parents))


def _most_likely(logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Of each row the `count` most probable tokens, each with its probability by softmax."""
    logits = logits.float()
    values, ids = logits.topk(count, -1)
    steps = (values - logits.logsumexp(-1, keepdim=True)).exp().clamp_(max=1.0)
    # one transfer for both: token ids are exact in float64
    both = torch.stack((ids.double(), steps.double())).tolist()
    return [
        [(int(id), step) for id, step in zip(of_row, steps_of, strict=True)]
        for of_row, steps_of in zip(both[0], both[1], strict=True)
    ]


def _check_vocabulary(folder: Path, own: Config, target_folder: Path, target: Config) -> None:
    """Raises ValueError unless both mean the same by a token id. Their embeddings may differ in padding (Qwen2.5-0.5B
    has 151,936 rows, Qwen2.5-32B 152,064) where both have tokenizers to compare."""
    ours, theirs = vocabulary(folder), vocabulary(target_folder)
    if own.vocab != target.vocab and not (ours and theirs):
        raise ValueError(
            f"drafter model {str(folder)!r} has a vocabulary of {own.vocab} tokens, the target one of {target.vocab}: "
            "give a checkpoint of the same vocabulary"
        )
    if ours and theirs and ours != theirs:
        raise ValueError(
            f"drafter model {str(folder)!r} has another vocabulary than the target: their tokenizers have "
            f"{len(ours)} and {len(theirs)} tokens, of which {len(ours.items() & theirs.items())} agree; give a "
            "checkpoint of the same vocabulary"
        )
