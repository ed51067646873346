"""Published methods and the key gate: formulas query by query, defining properties, and tiny models."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from builders import make_config
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_sequence
from test_contract import WAYS
from torch import Tensor

from focus_exp import UserError, attach
from focus_exp.attention.base import AttentionMethod, LayerShape
from focus_exp.attention.baselines import blocks, performer
from focus_exp.attention.baselines.block_gate import BlockGate
from focus_exp.attention.baselines.block_means import BlockMeans, TopBlocks
from focus_exp.attention.baselines.key_gate import KeyGate
from focus_exp.attention.baselines.longformer import Longformer
from focus_exp.attention.baselines.magicpig import MagicPIG, Sampled, agree_twice, sampling_probability
from focus_exp.attention.baselines.performer import Performer, orthogonal_directions
from focus_exp.attention.baselines.routing_transformer import RoutingTransformer
from focus_exp.attention.baselines.sparq import SparQ
from focus_exp.attention.baselines.top_tokens import BestTokens, TokenIndexer, TopTokens
from focus_exp.attention.registry import METHODS, build
from focus_exp.attention.selection import AttentionArgs, PairCounts, Selection, Sequence
from focus_exp.config import get_method_options

CONF = Path(__file__).parent.parent / "conf" / "attention"
WIDTH, SIZE = 12, 6
BASELINES = [way for way, (name, *_) in WAYS.items() if not name.startswith(("focus", "key_gate"))]


@dataclass
class Query:
    """Query i of a head: it sees `keys`, of a sequence that begins at `start`; k, v are those of its key head.

    mates: queries i of all heads that share them, this one's at `place`.
    """

    i: int
    head: int
    start: int
    keys: list[int]
    mates: Tensor
    place: int
    k: Tensor
    v: Tensor
    scaling: float
    softcap: float | None

    @property
    def q(self) -> Tensor:
        return self.mates[self.place]

    @property
    def share(self) -> int:
        return len(self.mates)

    def score(self, j: int) -> Tensor:
        s = (self.q @ self.k[j]) * self.scaling
        return s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)

    def softmax(self, keys: list[int]) -> Tensor:
        return self.mean(keys, torch.stack([self.score(j) for j in keys]).exp())

    def mean(self, keys: list[int], weights: Tensor) -> Tensor:
        return weights @ self.v[keys] / weights.sum()

    def is_near(self, j: int, window: int, sinks: int) -> bool:
        return self.i - j <= window or j - self.start < sinks


def longformer_formula(method: Longformer, x: Query, case: "Case", b: int) -> tuple[Tensor, list[int]]:
    stride = method.dilation if x.head >= case.heads - method.dilated_heads else 1
    reach = [x.i - stride * m for m in range(method.window + 1)]
    keys = [j for j in x.keys if j in reach or j - x.start < method.sinks]
    return x.softmax(keys), keys


def performer_formula(method: Performer, x: Query, case: "Case", b: int) -> tuple[Tensor, list[int]]:
    def phi(y: Tensor) -> Tensor:
        y = y * x.scaling**0.5
        return torch.stack([torch.exp(w @ y - y @ y / 2) for w in method.directions.double()])

    return x.mean(x.keys, torch.stack([phi(x.q) @ phi(x.k[j]) for j in x.keys])), x.keys


def routing_formula(method: RoutingTransformer, x: Query, case: "Case", b: int) -> tuple[Tensor, list[int]]:
    mates = [j for j in case.real[b] if case.sequence.start[b, j] == x.start]
    most = method.tokens_per_group or math.ceil(len(mates) / method.groups)
    clusters = []
    for centroid in method.centroids.double():
        nearness = {j: torch.cosine_similarity(case.h[b, j] - case.h[b, j].mean(), centroid, dim=0) for j in mates}
        clusters.append(sorted(mates, key=lambda j: (-nearness[j], j))[:most])
    routed = {j for members in clusters if x.i in members for j in members}
    keys = [j for j in x.keys if j in routed or x.is_near(j, method.window, method.sinks)]
    return x.softmax(keys), keys


def sparq_formula(method: SparQ, x: Query, case: "Case", b: int) -> tuple[Tensor, list[int]]:
    chosen = sorted(range(SIZE), key=lambda d: -x.mates[:, d].abs().sum())[: method.components]
    estimates = []
    for y in x.mates:
        coverage = y[chosen].abs().sum() / y.abs().sum()
        s = torch.stack([y[chosen] @ x.k[j, chosen] for j in x.keys]) * x.scaling / coverage.sqrt()
        s = s if x.softcap is None else x.softcap * torch.tanh(s / x.softcap)
        estimates.append(s.softmax(0))
    together = sum(estimates)
    recent = sum(x.i - j <= method.window for j in x.keys)
    order = sorted(range(len(x.keys)), key=lambda n: (x.i - x.keys[n] > method.window, -together[n]))
    kept = sorted(order[: recent + number_of(method, len(x.keys) - recent)])
    keys = [x.keys[n] for n in kept]
    out = x.softmax(keys)
    if method.reallocate:
        alpha = estimates[x.place][kept].sum()
        out = alpha * out + (1 - alpha) * x.v[x.keys].mean(0)
    return out, keys


def magicpig_formula(method: MagicPIG, x: Query, case: "Case", b: int) -> tuple[Tensor, list[int]]:
    first = range(x.start + method.sinks, x.start + method.sinks + method.window + 1)
    first = [j for j in case.real[b] if j in first and case.sequence.start[b, j] == x.start]
    centre = x.k[first].mean(0) if first else torch.zeros(SIZE, dtype=torch.float64)
    bits, tables = method.hash_bits, method.hash_tables
    keys, weights = [], []
    for j in x.keys:
        u, key = 1.0, x.k[j] - centre
        if not x.is_near(j, method.window, method.sinks):
            same = [bool(((x.q @ table > 0) == (key @ table > 0)).all()) for table in method.directions.double()]
            if sum(same) < 2:
                continue
            p = (1 - torch.acos(torch.cosine_similarity(x.q, key, dim=0)) / math.pi).item() ** bits
            u = 1 - (1 - p) ** tables - tables * p * (1 - p) ** (tables - 1)
        keys.append(j)
        weights.append(x.score(j).exp() / u)
    return x.mean(keys, torch.stack(weights)), keys


def number_of(method: TopTokens, distant: int) -> int:
    return int(distant * method.density) if method.distant_kept is None else method.distant_kept


def kept_of(method: TopTokens, x: Query, worth: Callable[[int], Tensor]) -> tuple[Tensor, list[int]]:
    near = [j for j in x.keys if x.is_near(j, method.window, method.sinks)]
    distant = sorted(set(x.keys) - set(near), key=lambda j: worth(j).tolist(), reverse=True)
    keys = sorted([*near, *distant[: number_of(method, len(distant))]])
    return x.softmax(keys), keys


def indexer_formula(method: TokenIndexer, x: Query, case: "Case", b: int) -> tuple[Tensor, list[int]]:
    queries, keys = method.query_projection.double(), method.key_projection.double()
    tokens = (case.h[b] - method.mean.double()) / method.scale.double()
    return kept_of(method, x, lambda j: (tokens[x.i] @ queries) @ (tokens[j] @ keys))


def gate_formula(method: KeyGate, x: Query, case: "Case", b: int) -> tuple[Tensor, list[int]]:
    tokens = (case.h[b] - method.mean.double()) / method.scale.double()
    scores = tokens @ method.weight[x.head // x.share].double() + method.bias[x.head // x.share].double()
    keys = [j for j in x.keys if scores[j] > method.threshold or x.is_near(j, method.window, method.sinks)]
    return x.softmax(keys), keys


def best_formula(method: BestTokens, x: Query, case: "Case", b: int) -> tuple[Tensor, list[int]]:
    def of_head(place: int) -> dict[int, Tensor]:
        mate = replace(x, place=place)
        p = torch.stack([mate.score(j) for j in x.keys]).softmax(0)
        out = p @ x.v[x.keys]
        return {j: weight * (x.v[j] - out).norm() for j, weight in zip(x.keys, p, strict=True)}

    heads = [of_head(place) for place in range(len(x.mates))]
    return kept_of(method, x, lambda j: sum(head[j] for head in heads))


def block_formula(method: TopBlocks, x: Query, case: "Case", b: int) -> tuple[Tensor, list[int]]:
    mates = [j for j in case.real[b] if case.sequence.start[b, j] == x.start]

    def members(block: int) -> list[int]:
        return [j for j in mates if (j - x.start) // method.keys_per_block == block and j - x.start >= method.sinks]

    def score(block: int) -> float:
        keys = x.k[members(block)]
        key = keys.mean(0)
        if isinstance(method, BlockGate):
            pooled = torch.cat([key, keys.amax(0), keys.amin(0)])
            key = pooled @ method.weight[x.head // x.share].double()
        return float((x.q @ key).detach())

    size = method.keys_per_block
    own = (x.i - x.start) // size
    scores = {n: score(n) if n < own else math.inf for n in range(own + 1) if members(n)}
    return kept_of(method, x, lambda j: torch.tensor([scores[(j - x.start) // size], j], dtype=torch.float64))


FORMULAS: dict[type[AttentionMethod], Callable[..., tuple[Tensor, list[int]]]] = {
    Longformer: longformer_formula,
    Performer: performer_formula,
    RoutingTransformer: routing_formula,
    SparQ: sparq_formula,
    MagicPIG: magicpig_formula,
    TokenIndexer: indexer_formula,
    BestTokens: best_formula,
    BlockMeans: block_formula,
    BlockGate: block_formula,
    KeyGate: gate_formula,
}


@contextmanager
def seq_len(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", size)
        patch.setattr(performer, "BLOCK", size)
        yield


@dataclass
class Case:
    """A drawn problem in float64: hidden states, q, k, v, where tokens lie, and how to attend."""

    h: Tensor
    tensors: list[Tensor]
    sequence: Sequence
    scaling: float
    softcap: float | None
    block: int

    @property
    def heads(self) -> int:
        return self.tensors[0].shape[1]

    @property
    def key_heads(self) -> int:
        return self.tensors[1].shape[1]

    @property
    def real(self) -> list[list[int]]:
        batch, length = self.sequence.start.shape
        valid = torch.ones(batch, length, dtype=torch.bool) if self.sequence.valid is None else self.sequence.valid
        return [row.nonzero()[:, 0].tolist() for row in valid]

    def seen(self, b: int, i: int) -> list[int]:
        if self.sequence.allowed is not None:
            return self.sequence.allowed[b % len(self.sequence.allowed), 0, i].nonzero()[:, 0].tolist()
        return [j for j in self.real[b] if j <= i]

    def run(self, method: AttentionMethod, tensors: list[Tensor]) -> tuple[Tensor, PairCounts]:
        with seq_len(self.block):
            selection = method.route(self.h, self.sequence)
            out = method.attend(*tensors, selection, self.sequence, AttentionArgs(self.scaling, self.softcap))
        return out, method.count_pairs(selection, self.sequence)

    def formula(self, method: AttentionMethod, tensors: list[Tensor]) -> tuple[Tensor, int, int]:
        """Outputs of the real tokens, zero elsewhere, and how many pairs there are and are kept, over heads."""
        q, k, v = tensors
        share, total, kept = self.heads // self.key_heads, 0, 0
        rows = {}
        for b, real in enumerate(self.real):
            for head in range(self.heads):
                for i in real:
                    g, place = divmod(head, share)
                    x = Query(
                        *(i, head, int(self.sequence.start[b, i]), self.seen(b, i)),
                        *(q[b, g * share : (g + 1) * share, i], place, k[b, g], v[b, g], self.scaling, self.softcap),
                    )
                    rows[b, head, i], keys = FORMULAS[type(method)](method, x, self, b)
                    total, kept = total + len(x.keys), kept + len(keys)
        out = torch.zeros_like(q)
        index = torch.tensor(list(rows)).T
        return out.index_put(tuple(index), torch.stack(list(rows.values()))), total, kept


def layout(kind: str, batch: int, length: int) -> Sequence:
    """Sequences as in `random_sequence`, and sliding layers: 5 tokens back."""
    if kind != "sliding":
        return random_sequence(kind, batch, length)
    i = torch.arange(length)
    allowed = (i[:, None] >= i) & (i[:, None] - i < 5)
    return Sequence(Sequence.plain(batch, length).start, allowed=allowed[None, None])


@st.composite
def cases(draw: st.DrawFn, softcap: bool = True) -> Case:
    torch.manual_seed(draw(st.integers(0, 10_000)))
    batch, length = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 7, 16]))
    heads, key_heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    q, k, v = (torch.randn(batch, n, length, SIZE, dtype=torch.float64) for n in (heads, key_heads, key_heads))
    sequence = layout(draw(st.sampled_from(["plain", "left", "right", "packed", "sliding"])), batch, length)
    return Case(
        h=torch.randn(batch, length, WIDTH, dtype=torch.float64),
        tensors=[q, k, v],
        sequence=sequence,
        scaling=draw(st.sampled_from([SIZE**-0.5, 1.0])),
        softcap=draw(st.sampled_from([None, 2.0])) if softcap else None,
        block=draw(st.sampled_from([1, 3, 5, 64])),
    )


DENSITY = st.sampled_from([0.0, 0.3, 0.5, 1.0])
KEPT = {"density": DENSITY, "window": st.integers(0, 4), "sinks": st.integers(0, 2)}
TOKENS = KEPT | {"tokens_kept": st.sampled_from([None, 0, 1, 4, 99])}
BLOCKS = KEPT | {"keys_per_block": st.integers(1, 5)}
OPTIONS = {
    "longformer": {"window": st.integers(0, 6), "global_tokens": st.integers(0, 3), "dilation": st.integers(1, 3),
                   "dilated_heads": st.integers(0, 2)},
    "performer": {"features": st.integers(1, 20), "seed": st.integers(0, 99)},
    "routing_transformer": {"groups": st.integers(1, 4), "tokens_per_group": st.sampled_from([None, 1, 3, 99]),
                            "window": st.integers(0, 3), "sinks": st.integers(0, 2)},
    "sparq": {"components": st.integers(1, SIZE), "tokens_kept": st.sampled_from([None, 3, 4, 6]), "density": DENSITY,
              "recent_tokens": st.integers(1, 3), "reallocate": st.booleans()},
    "magicpig": {"hash_bits": st.sampled_from([1, 2, 4, 9]),  # codes of one byte and of two
                 "hash_tables": st.integers(2, 9), "recent_tokens": st.integers(1, 4), "sinks": st.integers(0, 2),
                 "seed": st.integers(0, 99)},
    "best_tokens": TOKENS, "token_indexer": TOKENS, "block_means": BLOCKS, "block_gate": BLOCKS,
    "key_gate": {"window": st.integers(0, 4), "sinks": st.integers(0, 2)},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@given(data=st.data())
@settings(max_examples=7)
def test_baseline_any_input_equals_formula(name, data):
    case = data.draw(cases(softcap=name != "performer"))
    method = build(
        name, LayerShape(WIDTH, case.heads, SIZE, 0, case.key_heads), **data.draw(st.fixed_dictionaries(OPTIONS[name]))
    ).eval()
    if isinstance(method, BlockGate):
        torch.nn.init.normal_(method.weight)
    if hasattr(method, "mean"):  # of hidden states, as a fit finds it
        method.mean.normal_()
        method.scale.uniform_(0.5, 2)
    ours, theirs = ([t.clone().requires_grad_() for t in case.tensors] for _ in range(2))
    out, counts = case.run(method, ours)
    expected, total, kept = case.formula(method, theirs)
    real = torch.zeros(out.shape[0], 1, out.shape[2], 1, dtype=torch.bool)
    for b, places in enumerate(case.real):
        real[b, 0, places] = True
    assert out.isfinite().all()
    torch.testing.assert_close(out * real, expected, atol=1e-9, rtol=1e-9)
    assert (counts.total - counts.distant + counts.distant_kept) * total == kept * counts.total

    weights = torch.randn(out.shape, dtype=torch.float64)
    for result, leaves in ((out * real, ours), (expected, theirs)):
        (result * weights).sum().backward()
        assert all(leaf.grad.isfinite().all() for leaf in leaves)
    for mine, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, truth.grad, atol=1e-8, rtol=1e-8)


@given(layer=st.integers(0, 5), seed=st.integers(0, 9))
@settings(max_examples=10)
def test_random_groups_per_head_are_independent(layer, seed):
    shape, sequence = LayerShape(WIDTH, 6, SIZE, layer, 3), Sequence.plain(1, 400)
    options = {"groups": 4, "top_k": 2, "seed": seed}
    of_layer = build("random_groups", shape, **options).route(torch.zeros(1, 400, WIDTH), sequence)
    of_heads = build("random_groups", shape, heads="kv", **options).route(torch.zeros(1, 400, WIDTH), sequence)
    assert of_heads.key_groups.shape == (1, 3, 400, 4)
    for name in ("query_groups", "key_groups"):
        assert torch.equal(getattr(of_heads, name)[:, 0], getattr(of_layer, name))
    for head in (1, 2):
        same = (of_heads.key_groups[:, head] & of_layer.key_groups).sum() / 400
        assert 0.15 < same < 0.35


def shape(heads: int = 4, size: int = 16, index: int = 0) -> LayerShape:
    return LayerShape(width=WIDTH, heads=heads, head_dim=size, index=index, kv_heads=heads // 2)


def problem(length: int, heads: int = 4, key_heads: int = 2, size: int = 16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, key_heads, key_heads)
    return [torch.randn(1, n, length, size, dtype=torch.float64, generator=generator) for n in sizes]


def attended(method: AttentionMethod, tensors: list[Tensor], h: Tensor | None = None) -> Tensor:
    length = tensors[0].shape[2]
    sequence = Sequence.plain(1, length)
    h = torch.zeros(1, length, WIDTH, dtype=torch.float64) if h is None else h
    scaling = tensors[0].shape[-1] ** -0.5
    return method.attend(*tensors, method.route(h, sequence), sequence, AttentionArgs(scaling))


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("way", BASELINES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("length", [70, 300])
def test_baseline_low_precision_is_close_to_float64(way, dtype, tolerance, length):
    name, options, _ = WAYS[way]
    method = build(name, shape(), **options).eval()
    rounded = [t.to(dtype) for t in problem(length)]
    h = torch.randn(1, length, WIDTH)
    out = attended(method, rounded, h)
    assert out.dtype == dtype
    assert distance(out.double(), attended(method, [t.double() for t in rounded], h)) < tolerance


def test_performer_features_are_orthogonal_gaussian():
    size = 16
    generator = torch.Generator().manual_seed(0)
    rows = orthogonal_directions(200 * size + 3, size, generator).double()
    assert rows.shape == (200 * size + 3, size)
    blocks_of_rows = rows[: 200 * size].unflatten(0, (200, size))
    products = blocks_of_rows @ blocks_of_rows.transpose(-1, -2)
    lengths = products.diagonal(dim1=-2, dim2=-1)
    assert (products - torch.diag_embed(lengths)).abs().max() < 1e-4
    # chi-squared with D degrees of freedom: mean D, variance 2 D
    assert lengths.mean() == pytest.approx(size, rel=0.03) and lengths.var() == pytest.approx(2 * size, rel=0.1)
    assert rows.mean(0).abs().max() < 5 / len(rows) ** 0.5
    assert (rows.T @ rows / len(rows) - torch.eye(size)).abs().max() < 0.06

    x, y = 0.3 * torch.randn(2, size, dtype=torch.float64, generator=generator)
    phi = [torch.exp(rows @ t - t @ t / 2) for t in (x, y)]
    assert (phi[0] * phi[1]).mean().item() == pytest.approx(math.exp(x @ y), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [10, 100])
def test_performer_large_scores_stay_finite(dtype, scale):
    """Logits of a hundred and of ten thousand: outputs, among the values seen, and gradients stay finite."""
    q, k, v = (t.to(dtype) for t in problem(300))
    leaves = [(scale * q).requires_grad_(), (scale * k).requires_grad_(), v.requires_grad_()]
    out = attended(Performer.create(shape(), features=32), leaves)
    out.float().square().sum().backward()
    assert out.isfinite().all() and all(leaf.grad.isfinite().all() for leaf in leaves)
    assert out.abs().max() <= v.abs().max() * 1.01
    vanished = (out.norm(dim=-1) < 1e-3).float().mean()
    assert vanished < 0.1 if scale == 10 else vanished < 1


def clusters(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Hidden states `[1, T, E]` around `count` directions without mean, and which one each token belongs to."""
    centres = torch.randn(count, WIDTH)
    centres = torch.nn.functional.normalize(centres - centres.mean(-1, keepdim=True), dim=-1)
    which = torch.arange(length) % count
    return (centres[which] + 0.02 * torch.randn(length, WIDTH))[None] * 3 + 1, which


def test_routing_transformer_centroids_find_clusters():
    torch.manual_seed(3)
    h, which = clusters(3, 60)
    method = RoutingTransformer.create(shape(), groups=3, centroid_decay=0.5, window=0, sinks=0)
    method.centroids.copy_(torch.nn.functional.layer_norm(h[0, :3], (WIDTH,)) / 4 + 0.1 * torch.randn(3, WIDTH))
    units = torch.nn.functional.normalize(h[0] - h[0].mean(-1, keepdim=True), dim=-1)
    means = torch.stack([units[which == c].mean(0) for c in range(3)])
    sequence = Sequence.plain(1, 60)
    method.eval().route(h, sequence)
    assert (method.centroids - means).abs().max() > 0.05  # use moves nothing
    before = method.centroids.clone()
    method.train().route(h, sequence)
    method.update_statistics()
    torch.testing.assert_close(method.centroids, (before + means) / 2, atol=1e-5, rtol=1e-5)
    for _ in range(30):
        selection = method.route(h, sequence)
        method.update_statistics()
    torch.testing.assert_close(method.centroids, means, atol=1e-5, rtol=1e-5)
    assert torch.equal(selection.query_groups[0].int().argmax(-1), which)
    assert torch.equal(selection.query_groups[0].sum(-1), torch.ones(60, dtype=torch.long))


def test_routing_transformer_padding_keeps_centroids():
    method = RoutingTransformer.create(shape(), groups=3, tokens_per_group=7, centroid_decay=0.0).train()
    before = method.centroids.clone()
    h = torch.tensor([1.0] * 5 + [-1] * 3)[None, :, None] * before[1]  # padding in the opposite direction
    valid = torch.arange(8)[None] < 5
    selection = method.route(h, Sequence(torch.zeros(1, 8, dtype=torch.long), valid=valid))
    method.update_statistics()
    assert torch.equal(selection.key_groups, valid[..., None].expand(1, 8, 3))
    assert torch.equal(method.centroids[[0, 2]], before[[0, 2]])
    unit = torch.nn.functional.normalize(before[1] - before[1].mean(), dim=-1)
    torch.testing.assert_close(method.centroids[1], unit, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_routing_transformer_centroids_follow_all_batches_of_a_step(padded):
    alone = RoutingTransformer.create(shape(), groups=3, centroid_decay=0.5).train()
    other = copy.deepcopy(alone)
    h, start = torch.randn(2, 8, 12), torch.zeros(2, 8, dtype=torch.long)
    valid = torch.arange(8) < torch.tensor([[5], [8]]) if padded else None
    whole = alone.route(h, Sequence(start, valid=valid))
    for part in (slice(0, 1), slice(1, 2)):
        selection = other.route(h[part], Sequence(start[part], valid=None if valid is None else valid[part]))
        assert torch.equal(selection.key_groups, whole.key_groups[part])
    for method in (alone, other):
        method.update_statistics()
    torch.testing.assert_close(other.centroids, alone.centroids)


@pytest.mark.parametrize("name", ["performer", "sparq", "magicpig", "best_tokens", "token_indexer", "block_means"])
def test_baseline_sink_logits_raise(name):
    q, k, v = problem(8)
    sequence = Sequence.plain(1, 8)
    with pytest.raises(ValueError, match=f"^{name} does not support .* sinks"):
        args = AttentionArgs(1.0, sink_logits=torch.zeros(q.shape[1]))
        build(name, shape()).attend(q, k, v, Selection(), sequence, args)


def test_magicpig_sampling_frequency_equals_probability():
    generator = torch.Generator().manual_seed(0)
    cosine = torch.tensor([0.95, 0.6, 0.2, -0.3], dtype=torch.float64)
    q = torch.zeros(1, 1, 1, 1, 2, dtype=torch.float64)
    q[..., 0] = 1
    k = torch.stack([cosine, (1 - cosine**2).sqrt()], -1)[None, None, None]
    trials, hits = 4000, torch.zeros(4, dtype=torch.float64)
    method = MagicPIG.create(shape(size=2), hash_bits=3, hash_tables=5)
    for _ in range(trials):
        method.directions.copy_(torch.randn(method.directions.shape, generator=generator))
        hits += agree_twice(method.codes(q), method.codes(k))[0, 0, 0, 0].double()
    u = sampling_probability(cosine, 3, 5)
    assert ((hits / trials - u).abs() < 4 * (u * (1 - u) / trials).sqrt() + 1e-3).all()
    assert u[0] > 0.9 and 0 < u[-1] < 0.05


@pytest.mark.parametrize("cosine", [-1.0, -0.9, 0.0, 0.7, 0.999, 1.0])
@pytest.mark.parametrize(("bits", "tables"), [(1, 2), (8, 75), (10, 150), (15, 300)])
def test_magicpig_tiny_probability_is_exact(cosine, bits, tables):
    x = (1 - math.acos(cosine) / math.pi) ** bits
    expected = sum(math.comb(tables, n) * x**n * (1 - x) ** (tables - n) for n in range(2, tables + 1))
    found = sampling_probability(torch.tensor(cosine, dtype=torch.float64), bits, tables).item()
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-9)
    low = sampling_probability(torch.tensor(cosine), bits, tables).item()
    assert 0 < low <= 1 and low == pytest.approx(expected, rel=0.02, abs=1e-6)


@pytest.mark.parametrize("name", ["performer", "magicpig"])
def test_random_baseline_is_deterministic_per_seed_and_layer(name):
    tensors = problem(80)
    drawn = ((0, 0), (0, 0), (1, 0), (0, 1))
    outputs = [attended(build(name, shape(index=index), seed=seed), tensors) for seed, index in drawn]
    assert torch.equal(outputs[0], outputs[1])
    assert all(distance(other, outputs[0]) > 1e-3 for other in outputs[2:])


def test_magicpig_count_before_attend_raises():
    method, sequence = MagicPIG.create(shape()), Sequence.plain(1, 10)
    for selection in (Selection(), Sampled()):
        with pytest.raises(RuntimeError, match="after that"):
            method.count_pairs(selection, sequence)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sparq", {"components": 17}, "components must be <= 16"),
        ("sparq", {"recent_tokens": 9, "tokens_kept": 8}, "recent_tokens must be <= tokens_kept=8"),
        ("magicpig", {"hash_bits": 16}, "hash_bits must be <= 15"),
        ("magicpig", {"hash_tables": 1}, "hash_tables must be >= 2"),
        ("magicpig", {"recent_tokens": 0}, "recent_tokens must be >= 1"),
    ],
)
def test_baseline_invalid_option_raises(tiny_model, name, options, message):
    with pytest.raises(UserError, match=message):
        attach(tiny_model("llama"), name, **options)


def test_performer_model_with_softcap_raises(tiny_model):
    with pytest.raises(UserError, match="performer does not support a softcap"):
        attach(tiny_model("gemma2"), "performer")


@pytest.mark.parametrize("name", sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "full"))
def test_baseline_yaml_builds_method(name):
    config = make_config(f"attention={name}", "recipe=none", "seed=5").attention
    options = get_method_options(config)
    assert config.name == name and options.get("seed", 5) == 5
    assert type(build(config.method, shape(size=64), **options)) is METHODS[config.method]


def test_method_options_reach_the_module():
    config = make_config("attention=sparq_mean", "recipe=none", "attention.tokens_kept=21").attention
    method = build(config.method, shape(size=64), **get_method_options(config))
    assert isinstance(method, SparQ) and method.reallocate and method.distant_kept == 21 - 8
