"""The head against the published algorithm, written plainly; and folders that are refused."""

import json

import numpy as np
import pytest

from model.config import ModelConfig
from model.errors import ModelError
from model.families.eagle3 import Eagle3Head, load_eagle3
from model.families.eagle3_config import Eagle3Config
from tests.support.demo_engine import DEMO

TARGET = ModelConfig.read(DEMO)
EMBEDDING = np.zeros((TARGET.vocab_size, TARGET.hidden_size), np.float32)
LAYER = "layers.0."


def written(folder, config, tensors):
    """Write a folder; tensors by name, int64, bool or float32."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    words, header, data = {"i": "I64", "b": "BOOL", "f": "F32"}, {}, b""
    for name, values in tensors.items():
        offsets = [len(data), len(data) + values.nbytes]
        header[name] = {"dtype": words[values.dtype.kind], "shape": values.shape, "data_offsets": offsets}
        data += values.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def config_of(**changes):
    raw = json.loads((DEMO / "eagle3" / "config.json").read_text())
    layer = raw["transformer_layer_config"] | {"intermediate_size": 24, "num_attention_heads": 4, "head_dim": 8}
    return raw | {"draft_vocab_size": 50, "transformer_layer_config": layer} | changes


def layer(**changes):
    return {"transformer_layer_config": config_of()["transformer_layer_config"] | changes}


def flat(**changes):
    """Return a config of EAGLE's and SpecForge's layout."""
    return {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 50} | (
        config_of()["transformer_layer_config"] | changes
    )


def tensors_of(raw, folder, *, has_biases=False):
    rng = np.random.default_rng(1)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    config = Eagle3Config.read(folder, TARGET)
    shapes = config.shapes() | (config.bias_shapes() if has_biases else {})
    tensors = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    return tensors | {"d2t": 3 * np.arange(50), "t2d": np.zeros(TARGET.vocab_size, np.bool_)}


def fused(tensors):
    """Return q, k and v, and gate and up, in one tensor each, as some files have them."""
    tensors = dict(tensors)
    for name, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
        module = LAYER + name.partition(".")[0]
        for kind in ("weight", "bias"):
            tensors[f"{LAYER}{name}.{kind}"] = np.concatenate([tensors.pop(f"{module}.{p}_proj.{kind}") for p in parts])
    return tensors


def norm(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def rotated(x, positions):
    half = x.shape[-1] // 2
    angles = np.outer(positions, 10000.0 ** (-np.arange(half) / half))[:, None]
    cos, sin = (np.concatenate([one, one], -1) for one in (np.cos(angles), np.sin(angles)))
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def normed_states(tensors, states):
    """states [T, k H] as `fc` takes them."""
    if "input_norm.weight" in tensors:
        return norm(states, tensors["input_norm.weight"])
    weights = [tensors[f"fc_norm.{index}.weight"] for index in range(3) if f"fc_norm.{index}.weight" in tensors]
    parts = zip(np.split(states, 3, axis=1), weights, strict=True) if weights else ()
    return np.concatenate([norm(*part) for part in parts], axis=1) if weights else states


def published(tensors, embedding, hidden, token_ids, raw):
    """All positions at once, hidden [T, H]: output [T, H] and the draft vocabulary's logits [T, Vd]."""
    count, positions = len(hidden), np.arange(len(hidden))
    w = {name.removeprefix(LAYER).removesuffix(".weight"): values for name, values in tensors.items()}
    hidden_normed = norm(hidden, w["hidden_norm"])
    residual = hidden_normed if raw.get("norm_before_residual") else hidden
    x = np.concatenate([norm(embedding[token_ids], w["input_layernorm"]), hidden_normed], -1)

    def linear(x, module):
        return x @ w[module].T + w.get(f"{module}.bias", 0)

    q, k, v = (linear(x, f"self_attn.{name}_proj").reshape(count, -1, 8) for name in "qkv")
    if "self_attn.q_norm" in w:
        q, k = norm(q, w["self_attn.q_norm"]), norm(k, w["self_attn.k_norm"])
    q, k = rotated(q, positions), rotated(k, positions)
    k, v = (np.repeat(one, q.shape[1] // k.shape[1], axis=1) for one in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(8)
    scores = np.where(positions[:, None] >= positions, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(count, -1)
    out = residual + linear(attended, "self_attn.o_proj")
    mlp_input = norm(out, w["post_attention_layernorm"])
    gate, up = (linear(mlp_input, f"mlp.{name}_proj") for name in ("gate", "up"))
    out = out + linear(gate / (1 + np.exp(-gate)) * up, "mlp.down_proj")
    normed = norm(out, w["norm"])
    return normed if raw.get("norm_output") else out, normed @ w["lm_head"].T


FORMS = {
    "speculators": {},
    "normed residual": {"norm_before_residual": True},
    "speculators 0.7": {"norm_before_fc": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 4, 6]},
    "a norm of each state": {"fc_norm": True, "norm_before_residual": True},
    "Qwen3's layer": layer(model_type="qwen3"),
    "biases": layer(attention_bias=True, mlp_bias=True),
    "biases of Qwen3's layer": layer(model_type="qwen3"),
    "EAGLE's": flat(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_head_computes_the_published_algorithm(tmp_path, form):
    raw, rng = FORMS[form] if "hidden_size" in FORMS[form] else config_of(**FORMS[form]), np.random.default_rng(2)
    tensors = tensors_of(raw, tmp_path / "head", has_biases="biases" in form)
    stored = {name.replace(LAYER, "midlayer.") if form == "EAGLE's" else name: one for name, one in tensors.items()}
    stored = fused(stored) if form == "biases" else stored
    embedding = rng.normal(0, 1, EMBEDDING.shape).astype(np.float32)
    head = load_eagle3(written(tmp_path / "head", raw, stored), TARGET, embedding, 64)
    token_ids, width = rng.integers(0, 4096, 9), tensors["fc.weight"].shape[1]
    states = rng.normal(0, 1, (9, width)).astype(np.float32)
    hidden = head.hidden(states)
    np.testing.assert_allclose(hidden, normed_states(tensors, states) @ tensors["fc.weight"].T, rtol=1e-3, atol=1e-3)
    wanted, logits = published(tensors, embedding, np.float64(hidden), token_ids, raw)
    q, keys, values = head.project(hidden, token_ids, np.arange(9))
    keys, values = (one.swapaxes(0, 1)[None] for one in (keys, values))
    for at in range(9):
        mask = np.where(np.arange(9) <= at, 0, -np.inf).astype(np.float32)[None, None, None]
        out, drafted = head.finish(hidden[at : at + 1], head.attend(q[at : at + 1], keys, values, mask))
        np.testing.assert_allclose(out[0], wanted[at], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(drafted[0], logits[at], rtol=1e-3, atol=1e-3)
    assert head.token_ids.tolist() == [4 * index for index in range(len(logits[0]))]  # id = index + d2t


@pytest.mark.parametrize(
    ("name", "values", "refusal"),
    [
        ("fc.weight", None, "fc.weight is missing"),
        ("fc.weight", np.zeros((256, 256), np.float32), r"its shape is \(256, 256\)"),
        ("lm_head.weight", np.full((50, 256), np.nan, np.float32), "not all values are finite"),
        ("norm.weight", np.zeros(256, np.int64), "int64 is not supported .float32, float16, bfloat16."),
        (
            "layers.1.mlp.up_proj.weight",
            np.zeros((24, 256), np.float32),
            "layers.1.mlp.up_proj.weight is not a tensor of a head",
        ),
        ("d2t", None, "d2t is not a list of 50 integers"),
        ("d2t", np.zeros(50, np.float32), "d2t is not a list of 50 integers"),
        ("d2t", np.full(50, 4096), "beyond the model's vocabulary of 4096"),
        ("d2t", np.full(50, -9), "beyond the model's vocabulary of 4096"),
        ("embed_tokens.weight", np.zeros((9, 256), np.float32), "its shape is"),
    ],
)
def test_wrong_tensors_are_refused_by_name(tmp_path, name, values, refusal):
    raw = config_of()
    tensors = tensors_of(raw, tmp_path) | {name: values}
    written(tmp_path, raw, {one: each for one, each in tensors.items() if each is not None})
    with pytest.raises(ModelError, match=refusal):
        load_eagle3(tmp_path, TARGET, EMBEDDING, 64)


def test_a_folder_without_safetensors_names_the_converter(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    with pytest.raises(
        ModelError, match=r"no model.safetensors .pickles are never loaded; the speculators library converts"
    ):
        load_eagle3(tmp_path, TARGET, EMBEDDING, 64)


def test_the_demo_head_is_small_and_proposes_three():
    head = load_eagle3(DEMO / "eagle3", TARGET, EMBEDDING, 64)
    assert isinstance(head, Eagle3Head)
    assert head.config.num_speculative_tokens == 3
    assert sum(path.stat().st_size for path in (DEMO / "eagle3").iterdir()) <= 2_000_000
