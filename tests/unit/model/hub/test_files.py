"""Files of a repository that are served, and the error if it has none."""

import pytest

from model.errors import ModelError
from model.hub.files import ADAPTER_FILES, small_files, weight_files

SMALL = {"config.json", "tokenizer.json"}


def test_code_pickles_and_other_files_are_left_out():
    more = {"chat_template.jinja", "modeling_x.py", "README.md", "training_args.bin", "vocab.json"}
    assert sorted(small_files(SMALL | more)) == ["chat_template.jinja", "config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("names", "index", "chosen"),
    [
        ({"model.safetensors", "consolidated.safetensors", "pytorch_model.bin"}, {}, ["model.safetensors"]),
        (
            {"model.safetensors.index.json", "a.safetensors", "b/c.safetensors", "d.safetensors"},
            {"x": "b/c.safetensors", "y": "a.safetensors", "z": "a.safetensors"},
            ["model.safetensors.index.json", "a.safetensors", "b/c.safetensors"],
        ),
        ({"m-Q4_0.gguf", "imatrix/x.gguf"}, {}, ["m-Q4_0.gguf"]),
        ({f"m-0000{n}-of-00002.gguf" for n in (1, 2)}, {}, ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
    ],
)
def test_only_weights_that_the_loader_reads_are_chosen(names, index, chosen):
    assert weight_files(names, lambda: {"weight_map": index}) == chosen


@pytest.mark.parametrize(
    ("names", "index", "reason"),
    [
        ({"pytorch_model.bin"}, {}, "has no model.safetensors (pickled weights are never loaded)"),
        (set(), {}, "has no model.safetensors"),
        (
            {"m-00001-of-00003.gguf", "m-00002-of-00003.gguf"},
            {},
            "has 2 .gguf files: download the one to serve, and give its folder",
        ),
        ({"a.gguf", "b.gguf"}, {}, "has 2 .gguf files: download the one to serve, and give its folder"),
        (
            {"model.safetensors.index.json"},
            {"weight_map": {"x": "a.safetensors"}},
            "has no a.safetensors, which model.safetensors.index.json names",
        ),
        ({"model.safetensors.index.json"}, {"weight_map": []}, "model.safetensors.index.json: no weight_map"),
        ({"model.safetensors.index.json"}, {"weight_map": {"x": 1}}, "model.safetensors.index.json: no weight_map"),
    ],
)
def test_a_repository_without_them_is_refused(names, index, reason):
    with pytest.raises(ModelError) as refusal:
        weight_files(names, lambda: index)
    assert str(refusal.value) == reason


@pytest.mark.parametrize("missing", sorted(SMALL))
def test_config_and_tokenizer_must_be_there(missing):
    with pytest.raises(ModelError, match=f"^has no {missing}$"):
        small_files(SMALL - {missing})


def test_an_adapter_has_two_files():
    available = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"}
    assert ADAPTER_FILES.small(available) == ["adapter_config.json"]
    assert ADAPTER_FILES.weights(available, dict) == ["adapter_model.safetensors"]
    with pytest.raises(ModelError, match=r"^has no adapter_config\.json$"):
        ADAPTER_FILES.small({"config.json"})
    with pytest.raises(ModelError, match=r"^has no adapter_model\.safetensors \(pickled weights are never loaded\)$"):
        ADAPTER_FILES.weights({"adapter_model.bin"}, dict)
