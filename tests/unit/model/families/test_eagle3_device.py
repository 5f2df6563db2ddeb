"""The head through `Ops` against the head in NumPy."""

from dataclasses import replace

import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.families.eagle3 import Eagle3Head, dummy_eagle3
from model.families.eagle3_config import Eagle3Config
from model.families.eagle3_device import check_on_device
from model.ops.cpu.ops import NumpyOps
from tests.support.demo_engine import DEMO
from tests.support.draft_heads import BLOCK_SIZE, NUM_DRAFTS, RUNS, TARGET, WIDTH, draft_alone, random_head, random_rows

FLOAT32 = np.dtype(np.float32)


def drafts_of_the_host(stored, embedding, states, next_ids, position):
    """States and tokens of positions 0 to `position`: logits of greedy drafts, float32[K, draft vocabulary]."""
    head = Eagle3Head(stored.config, stored.weights, stored.token_ids, embedding, WIDTH * BLOCK_SIZE)
    hidden = head.hidden(states)
    q, keys, values = head.project(hidden, next_ids, np.arange(position + 1))
    hidden, q, logits = hidden[-1:], q[-1:], []
    for step in range(NUM_DRAFTS):
        both = (one.swapaxes(0, 1)[None] for one in (keys, values))
        mask = np.where(np.arange(len(keys)) >= len(keys) - stored.config.window, 0, -np.inf).astype(np.float32)
        attended = head.attend(q, *both, mask[None, None, None])
        hidden, drafted = head.finish(hidden, attended)
        logits.append(drafted[0])
        ids = stored.token_ids[drafted.argmax(axis=1)]
        q, key, value = head.project(hidden, ids, np.array([position + 1 + step]))
        keys, values = np.concatenate([keys, key]), np.concatenate([values, value])
    return np.array(logits)


WINDOW = 9


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "fc_norm": True},
        {
            "norm_before_fc": True,
            "norm_output": True,
            "layer": {"layer_types": ["sliding_attention"], "sliding_window": WINDOW},
        },
        {"layer": {"model_type": "qwen3"}},
        {"has_biases": True},
    ],
)
def test_drafts_after_a_ragged_step_are_the_hosts(changes):
    stored = random_head(7, **changes)
    drafted = draft_alone(NumpyOps(FLOAT32), stored)
    embedding, rows = random_rows()
    assert drafted.num_accepted.tolist() == [num_right for *_, num_right in RUNS]
    for s, (start, _, num_right) in enumerate(RUNS):
        if s % 2:  # not greedy
            continue
        position = start + num_right
        states, next_ids = (np.array([rows[s, at][part] for at in range(position + 1)]) for part in (0, 1))
        wanted = drafts_of_the_host(stored, embedding, states, next_ids, position)
        got = np.array([each[s][stored.token_ids] for each in drafted.logits])
        np.testing.assert_allclose(got, wanted, atol=2e-3)
        assert drafted.drafts[:, s].tolist() == stored.token_ids[wanted.argmax(axis=1)].tolist()


def test_a_head_of_other_keys_is_refused_by_name():
    target = ModelConfig.read(DEMO)
    config = Eagle3Config.read(DEMO / "eagle3", target)
    check_on_device(config, target)
    with pytest.raises(ModelError, match=r"a head with 4 KV heads of 64 is not supported on a GPU .the model's: 2"):
        check_on_device(replace(config, num_kv_heads=4), target)


def test_dummy_weights_have_the_configs_shapes():
    stored = dummy_eagle3(DEMO / "eagle3", TARGET, FLOAT32)
    assert {name: one.shape for name, one in stored.weights.items()} == stored.config.shapes()
    assert len(set(stored.token_ids.tolist())) == stored.config.draft_vocab_size
    assert stored.token_ids.max() < TARGET.vocab_size
