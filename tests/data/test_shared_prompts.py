"""The packed rows of a GRPO batch: which tokens, in which segments, predicting which labels."""

import random

import pytest
import torch

from unsloth_trl.data.shared_prompts import (
    Row,
    build_shared_rows,
    count_tokens,
    cut_by_tokens,
    describe_rows,
    find_groups,
    order_rows,
)


A, B, C = [11, 12, 13], [21], [31, 32]
# rows of three prompts, not in order; one completion is masked, one has no token
ROWS = [(A, [101, 102]), (C, [301]), (A, [111]), (B, [201, 202, 203]), (A, [121, 122, 123]), (B, [211]), (C, [])]
MASKED = 5


def padded(rows=ROWS, masked=(MASKED,)):
    """Ids and mask as TRL makes them, and the width of the completions."""
    left, right = max(len(p) for p, _ in rows), max(len(c) for _, c in rows)
    ids = torch.zeros(len(rows), left + right, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (p, c) in enumerate(rows):
        ids[i, left - len(p) : left + len(c)] = torch.tensor(p + c)
        mask[i, left - len(p) : left + (0 if i in masked else len(c))] = 1
    return ids, mask, right


def test_rows_are_described():
    ids, mask, width = padded()
    rows = describe_rows(ids, mask, width)
    assert [(r.prompt_length, r.completion_length) for r in rows] == [
        (3, 2),
        (2, 1),
        (3, 1),
        (1, 3),
        (3, 3),
        (1, 0),
        (2, 0),
    ]
    assert rows[0].prompt == rows[2].prompt == rows[4].prompt != rows[1].prompt
    # a prompt that ends like another one is another one
    assert rows[1].prompt == torch.tensor(C).numpy().tobytes()
    assert find_groups(rows) == [[0, 2, 4], [1, 6], [3, 5]]
    assert find_groups(rows, share=False) == [[i] for i in range(7)]


def test_what_cannot_be_packed_is_named():
    ids, mask, width = padded()
    holes = mask.clone()
    holes[0, -width] = 0  # the completion's first token
    assert describe_rows(ids, holes, width) == "the mask of a row has holes"
    mask[3, : ids.shape[1] - width] = 0
    assert describe_rows(ids, mask, width) == "a prompt has no token"


def read(packed, ids, width):
    """Tokens by segment, and for each labelled token (token that predicts it, label, its cell of the result)."""
    source, position, label, target = packed.split()
    tokens = ids.flatten()[source].tolist()
    segments, start = [], 0
    for n in packed.layout.seqlens:
        segments.append(tokens[start : start + n])
        start += n
    predictions = [
        (tokens[p], ids.flatten()[i].item(), divmod(t, width))
        for p, i, t in zip(position.tolist(), label.tolist(), target.tolist(), strict=True)
    ]
    return segments, predictions


def test_prompts_come_once_and_first():
    ids, mask, width = padded()
    rows = describe_rows(ids, mask, width)
    packed = build_shared_rows(rows, find_groups(rows), ids.shape[1], width)
    segments, predictions = read(packed, ids, width)
    # the shared prompt without its last token; rows that are alone with their prompt; then the shared one's branches
    assert segments == [[11, 12], [31, 32], [21, 201, 202], [13, 101], [13], [13, 121, 122]]
    assert packed.layout.parents == (-1, -1, -1, 0, 0, 0)
    assert packed.layout.position_ids[0].tolist() == [0, 1, 0, 1, 0, 1, 2, 2, 3, 2, 2, 3, 4]
    assert predictions == [
        (32, 301, (1, 0)),
        (21, 201, (3, 0)),
        (201, 202, (3, 1)),
        (202, 203, (3, 2)),
        (13, 101, (0, 0)),
        (101, 102, (0, 1)),
        (13, 111, (2, 0)),
        (13, 121, (4, 0)),
        (121, 122, (4, 1)),
        (122, 123, (4, 2)),
    ]
    assert packed.weights is None
    assert packed.num_tokens == sum(count_tokens(rows, members) for members in find_groups(rows)) == 13


def test_without_sharing_each_row_is_a_segment():
    ids, mask, width = padded()
    rows = describe_rows(ids, mask, width)
    packed = build_shared_rows(rows, find_groups(rows, share=False), ids.shape[1], width)
    segments, predictions = read(packed, ids, width)
    assert segments == [
        [11, 12, 13, 101],
        [31, 32],
        [11, 12, 13],
        [21, 201, 202],
        [11, 12, 13, 121, 122],
    ]
    assert packed.layout.parents is None
    assert len(predictions) == 10 and predictions[0] == (13, 101, (0, 0))


def test_all_tokens_are_weighted_as_the_padded_rows_count_them():
    ids, mask, width = padded()
    rows = describe_rows(ids, mask, width)
    packed = build_shared_rows(rows, find_groups(rows), ids.shape[1], width, all_tokens=True)
    segments, predictions = read(packed, ids, width)
    assert segments == [
        [11, 12],
        [31],
        [21, 201, 202, 203],
        [21],
        [13, 101, 102],
        [13, 111],
        [13, 121, 122, 123],
        [32, 301],
        [32],
    ]
    assert packed.weights.tolist() == [[3.0] * 2 + [2.0] + [1.0] * 17]
    assert len(predictions) == 10
    # each token of the padded batch that its mask has, as often as it is there
    counted = {}
    for token, weight in zip((t for s in segments for t in s), packed.weights[0].tolist(), strict=True):
        counted[token] = counted.get(token, 0) + weight
    expected = {}
    for token in ids[mask.bool()].tolist():
        expected[token] = expected.get(token, 0) + 1
    assert counted == expected


def test_nothing_to_score_is_one_token():
    ids, mask, width = padded([(A, [101]), (A, [102])], masked=(0, 1))
    rows = describe_rows(ids, mask, width)
    assert cut_by_tokens(rows, find_groups(rows), 100) == []
    packed = build_shared_rows(rows, find_groups(rows), ids.shape[1], width)
    assert read(packed, ids, width) == ([[13]], [])


def draw_rows(sizes, prompt=(1, 60), completion=(0, 40), seed=0):
    rng = random.Random(seed)
    rows = []
    for group, size in enumerate(sizes):
        length = rng.randint(*prompt)
        rows += [Row(bytes([group]), length, rng.randint(*completion)) for _ in range(size)]
    rng.shuffle(rows)
    return rows


@pytest.mark.parametrize("budget", [1, 50, 100, 10_000])
def test_passes_keep_to_the_budget(budget):
    rows = draw_rows([4, 1, 8, 3, 4])
    groups = find_groups(rows)
    passes = cut_by_tokens(rows, groups, budget)
    taken = [i for groups in passes for members in groups for i in members]
    assert sorted(taken) == [i for i, row in enumerate(rows) if row.completion_length]
    for one in passes:
        tokens = sum(count_tokens(rows, members) for members in one)
        assert tokens <= budget or len(one) == len(one[0]) == 1
        for members in one:
            assert len({rows[i].prompt for i in members}) == 1
    whole = {
        frozenset(i for i in members if rows[i].completion_length)
        for members in groups
        if count_tokens(rows, members) <= budget
    }
    assert whole - {frozenset()} <= {frozenset(members) for one in passes for members in one}
    assert len(passes) == 1 if budget == 10_000 else len(passes) > 1


def batches_of(order, size):
    return [order[i : i + size] for i in range(0, len(order), size)]


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize(
    ("group", "per_batch", "batches"), [(4, 8, 4), (4, 4, 6), (8, 2, 8), (4, 6, 4), (3, 2, 9), (1, 5, 3), (6, 9, 4)]
)
def test_order_is_a_permutation_that_keeps_groups_together(group, per_batch, batches, balance):
    rows = draw_rows([group] * (per_batch * batches // group), completion=(1, 40))
    groups = find_groups(rows)
    order = order_rows(rows, groups, per_batch, batches, balance)
    assert sorted(order) == list(range(len(rows)))
    pieces = [{rows[i].prompt for i in batch} for batch in batches_of(order, per_batch)]
    if per_batch % group == 0:
        assert all(len(piece) == per_batch // group for piece in pieces)
    elif group % per_batch == 0:
        assert all(len(piece) == 1 for piece in pieces)
    else:  # a cut needs no more pieces than a cut of the groups one after the other
        assert sum(map(len, pieces)) <= len(groups) + batches


def load(rows, batch):
    groups = [[i for i in batch if rows[i].prompt == prompt] for prompt in {rows[i].prompt for i in batch}]
    return sum(count_tokens(rows, members) for members in groups)


def test_balance():
    """Random groups of 4, 8 micro-batches of 4 groups: the heaviest is near the mean, in random order it is not."""
    worst = {True: [], False: []}
    for seed in range(20):
        rows = draw_rows([4] * 32, prompt=(50, 1000), completion=(10, 300), seed=seed)
        for balance, ratios in worst.items():
            order = order_rows(rows, find_groups(rows), 16, 8, balance)
            loads = [load(rows, batch) for batch in batches_of(order, 16)]
            ratios.append(max(loads) * len(loads) / sum(loads))
    assert max(worst[True]) < 1.12
    assert sum(worst[False]) / 20 > 1.2


def test_windows_hold_the_groups_dealt_to_them():
    """Balance moves nothing from one optimizer step to another: each has the groups of its turn."""
    rows = draw_rows([4] * 8)
    groups = find_groups(rows)
    order = order_rows(rows, groups, 4, 2)
    for step in range(4):
        dealt = {i for members in groups[2 * step : 2 * step + 2] for i in members}
        assert set(order[8 * step : 8 * step + 8]) == dealt


def test_a_large_group_is_cut_into_even_parts():
    rows = [Row(b"a", 10, n) for n in range(1, 17)]
    order = order_rows(rows, find_groups(rows), 4, 4)
    assert [sum(rows[i].completion_length for i in batch) for batch in batches_of(order, 4)] == [34] * 4
