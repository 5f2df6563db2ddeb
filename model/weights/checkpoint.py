"""Weights of a model folder, checked against its config."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from model.config import ModelConfig
from model.dtypes import all_finite
from model.errors import ModelError
from model.gguf_file import find_gguf
from model.json_files import read_json_object
from model.ops.weight import WeightFormat
from model.stored_names import INDEX_BYTES, INDEX_FILE, SINGLE_FILE
from model.weights.expert_stacks import split_stacks
from model.weights.formats.gguf import read_gguf_weights
from model.weights.formats.quantisation import Quantisation
from model.weights.formats.registry import read_quantisation
from model.weights.formats.stored_matrix import FLOATS, ModuleTensors, StoredMatrix
from model.weights.kv_scales import is_kv_scale, read_kv_scales
from model.weights.name_spelling import find_spelling
from model.weights.safetensors_file import DTYPE_WORDS, FLOAT_DTYPES, StoredTensor, read_safetensors

EMBEDDING, FINAL_NORM = "model.embed_tokens.weight", "model.norm.weight"
LM_HEAD = "lm_head.weight"
HEAD = "lm_head"
PROJECTIONS = ("_proj.weight", "_linear.weight", ".w1.weight", ".w2.weight", ".w3.weight")
IGNORED = re.compile(
    r"rotary_emb\.inv_freq$"
    r"|\.self_attn\.(attn\.)?(q|k|v|kv|prob)_scale$"
    r"|\.self_attn\.([qkv]|qkv)_proj\.([kv]_scale|output_scale)$"
)
"""Rotary frequencies, derived from the config, and scales of 8-bit attention (see `kv_scales`)."""

PartShape = Callable[[str, tuple[int, ...]], tuple[int, ...]]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor's unquantised shape by its name in the files."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
    shapes[FINAL_NORM] = (hidden,)
    if config.has_head and not config.tied_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def loaded_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return `expected_shapes`, plus the head of tied embeddings if a factor is folded into them."""
    shapes = expected_shapes(config)
    return shapes if config.shares_embedding else shapes | {LM_HEAD: shapes[EMBEDDING]}


def stores_quantised(directory: Path) -> bool:
    """Return True if the config says quantised or the folder is GGUF. Raises ModelError."""
    has_safetensors = any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
    return read_quantisation(directory) is not None or (not has_safetensors and find_gguf(directory) is not None)


class Checkpoint:
    """Tensors of a folder, checked except for their values."""

    def __init__(
        self,
        tensors: dict[str, StoredTensor],
        matrices: dict[str, StoredMatrix],
        label: str,
        read_kv_scales: Callable[[], np.ndarray | None] = lambda: None,
    ):
        """`matrices`: quantised, by the names of their plain tensors."""
        self.label = label
        self._read_kv_scales = read_kv_scales
        self._tensors = tensors
        self._matrices = matrices

    @staticmethod
    def open(directory: Path, config: ModelConfig) -> Checkpoint:
        """Read and check the headers. Raises ModelError with the file and the tensor."""
        directory = Path(directory)
        if (directory / SINGLE_FILE).exists():
            tensors = read_safetensors(directory / SINGLE_FILE)
        elif (directory / INDEX_FILE).exists():
            tensors = _read_shards(directory)
        elif (path := find_gguf(directory)) is not None:
            return _open_gguf(directory, path, config)
        else:
            raise ModelError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} nor a .gguf file is there")
        scales = {name: tensor for name, tensor in tensors.items() if is_kv_scale(name)}
        read_scales = partial(read_kv_scales, scales, config, directory)
        tensors = split_stacks(tensors, config)
        spelling = find_spelling(tensors, config)
        tensors = {
            known: tensor
            for name, tensor in tensors.items()
            if not IGNORED.search(name) and (known := spelling.known(name)) is not None
        }
        if config.tied_embeddings:
            tensors.pop(LM_HEAD, None)
        shapes, quantisation = expected_shapes(config), read_quantisation(directory)
        if quantisation is None:
            _check_names(directory, shapes, tensors)
            return Checkpoint(tensors, {}, "", read_scales)
        scheme_of, may_be_dense = quantisation.scheme_of, quantisation.may_be_dense
        router = f".{config.tensors.router}"
        quantisation = replace(
            quantisation,
            scheme_of=lambda module: scheme_of(spelling.stored(module)),
            may_be_dense=lambda module: module.endswith(router) or may_be_dense(spelling.stored(module)),
        )
        matrices = _read_matrices(directory, shapes, tensors, quantisation, router)
        _check_names(directory, {name: shape for name, shape in shapes.items() if name not in matrices}, tensors)
        return Checkpoint(tensors, matrices, quantisation.label, read_scales)

    @property
    def keeps_formats(self) -> bool:
        """True if any matrix stays quantised."""
        return any(self.matrix(name) is not None for name in self._matrices)

    def num_bytes(self, config: ModelConfig, dtype: np.dtype, part_shape: PartShape) -> dict[str, int]:
        """Return each weight's bytes for activations in `dtype`; part_shape(name, shape) is a rank's part."""
        num_bytes = {}
        for name, whole in loaded_shapes(config).items():
            shape, matrix = part_shape(name, whole), self.matrix(name)
            if matrix is None:
                num_bytes[name] = math.prod(shape) * np.dtype(dtype).itemsize
            else:
                num_bytes[name] = matrix.form.num_bytes(*shape)
        return num_bytes

    def kv_scales(self) -> np.ndarray | None:
        """Return float32[L, 2, Hkv] of an fp8 KV cache; None if none is stored. Raises ModelError."""
        return self._read_kv_scales()

    def matrix(self, name: str) -> StoredMatrix | None:
        """Return the quantised matrix; None if it is read in the activations' dtype."""
        matrix = self._matrices.get(name)
        return None if matrix is None or matrix.form.format is WeightFormat.DENSE else matrix

    def dtype(self, name: str) -> np.dtype:
        """Stored dtype of a dense tensor."""
        return self._tensors[name].dtype

    def read_into(self, name: str, start: int, out: np.ndarray) -> None:
        """Fill contiguous `out`, in its dtype, from element `start` on. Thread-safe. Raises ModelError.

        If the dtypes differ, the stored elements take memory too.
        """
        if name in self._matrices:
            self._matrices[name].arrays["data"].read_into(start, out)
            return
        tensor = self._tensors[name]
        if out.dtype == tensor.dtype:
            tensor.read_into(start, out)
            return
        values = np.empty(out.shape, tensor.dtype)
        tensor.read_into(start, values)
        with np.errstate(over="ignore", invalid="ignore"):
            out[...] = values

    def nonfinite(self, name: str, dtype: np.dtype) -> ModelError:
        """Return the error for a tensor with NaN or infinity in `dtype`."""
        if name in self._matrices:
            return ModelError(
                f"{self._matrices[name].name}: dequantises to NaN, infinity or more than {dtype.name} holds"
            )
        tensor = self._tensors[name]
        problem = f"values too large for {dtype.name}" if all_finite(tensor.values()) else "NaN or infinity"
        return tensor.error(f"holds {problem}")


def _open_gguf(directory: Path, path: Path, config: ModelConfig) -> Checkpoint:
    weights, shapes = read_gguf_weights(path, config), expected_shapes(config)
    vectors, matrices = weights.vectors, weights.matrices
    if config.tied_embeddings:
        matrices.pop(LM_HEAD, None)
    for name, matrix in matrices.items():
        if matrix.shape != shapes.get(name):
            raise ModelError(
                f"{path}: {name}: shape is {list(matrix.shape)}, but the config makes it {shapes.get(name)}"
            )
    _check_names(directory, {name: shape for name, shape in shapes.items() if name not in matrices}, vectors)
    return Checkpoint(vectors, matrices, weights.label)


def _read_matrices(
    directory: Path,
    shapes: dict[str, tuple[int, ...]],
    tensors: dict[str, StoredTensor],
    quantisation: Quantisation,
    router: str,
) -> dict[str, StoredMatrix]:
    """Remove the quantised matrices from `tensors` and return them; the config must agree.

    Routers (modules ending with `router`) must be dense or dequantised while read.
    """
    quantised = (name for name in shapes if name.endswith((LM_HEAD, f"{router}.weight")) or is_projection(name))
    by_module: dict[str, dict[str, StoredTensor]] = {name.removesuffix(".weight"): {} for name in quantised}
    for name in [*tensors]:
        module, suffix = _module_of(name, by_module)
        if module is not None and suffix != "bias":
            by_module[module][suffix] = tensors[name]
    matrices = {}
    for module, own in by_module.items():
        scheme = quantisation.scheme_of(module)
        is_dense = set(own) == {"weight"} and own["weight"].dtype in FLOATS
        if is_dense and scheme is not None and not quantisation.may_be_dense(module):
            raise own["weight"].error(f"is not quantised, but {quantisation.source} quantises it")
        if is_dense or not own:
            continue
        if scheme is None:
            suffix = next((suffix for suffix in sorted(own) if suffix != "weight"), "weight")
            raise own[suffix].error(f"is quantised, but {quantisation.source}: {quantisation.skip_field} leaves it out")
        module_tensors = ModuleTensors(module, str(directory), own)
        num_outputs, num_inputs = shapes[f"{module}.weight"]
        matrix = matrices[f"{module}.weight"] = scheme.read(module_tensors, (num_outputs, num_inputs))
        if module.endswith(router) and matrix.form.format is not WeightFormat.DENSE:
            raise ModelError(
                f"{directory}: {module}: a router in {matrix.form.format} is not supported (16 or 32 bits)"
            )
        module_tensors.finish()
        for suffix in own:
            del tensors[f"{module}.{suffix}"]
        if f"{module}.bias" not in shapes:
            _drop_zeros(tensors, f"{module}.bias")
    return matrices


def _drop_zeros(tensors: dict[str, StoredTensor], name: str) -> None:
    """Drop a bias the model lacks (AutoGPTQ stores one per matrix). Raises ModelError unless it is 0."""
    if (bias := tensors.pop(name, None)) is not None and bias.values().any():
        raise bias.error("is not 0, but the model has no such bias")


def is_projection(name: str) -> bool:
    """Return True for matrices that formats quantise: all but embedding, head and router."""
    return name.endswith(PROJECTIONS)


def _module_of(name: str, modules: Container[str]) -> tuple[str | None, str]:
    """Split a tensor's name into (one of `modules`, rest)."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (module := ".".join(parts[:end])) in modules:
            return module, ".".join(parts[end:])
    return None, name


def layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors by their names in it."""
    hidden, tensors = config.hidden_size, config.tensors
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    modules = {
        **_divided(tensors.qkv, (q_size, kv_size, kv_size), hidden, config.qkv_bias),
        tensors.output: (hidden, q_size, config.output_bias),
        **(_expert_modules(config) if config.has_experts(layer) else _mlp_modules(config)),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (num_outputs, num_inputs, has_bias) in modules.items():
        shapes[f"{name}.weight"] = (num_outputs, num_inputs)
        if has_bias:
            shapes[f"{name}.bias"] = (num_outputs,)
    shapes[f"{tensors.attention_norm}.weight"] = shapes[f"{tensors.mlp_norm}.weight"] = (hidden,)
    if config.qk_norm:
        shapes[f"{tensors.q_norm}.weight"] = (q_size if config.qk_norm_whole else config.head_dim,)
        shapes[f"{tensors.k_norm}.weight"] = (kv_size if config.qk_norm_whole else config.head_dim,)
    return shapes


def _mlp_modules(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    hidden, size, tensors = config.hidden_size, config.intermediate_size, config.tensors
    modules = _divided(tensors.gate_up, (size, size), hidden, config.mlp_bias)
    return {**modules, tensors.down: (hidden, size, config.mlp_bias)}


def _expert_modules(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    experts = config.experts
    if experts is None:
        return {}
    hidden, size, tensors = config.hidden_size, experts.intermediate_size, config.tensors
    modules = {tensors.router: (experts.num_experts, hidden, False)}
    for expert in range(experts.num_experts):
        gate_up, down = tensors.of_expert(expert)
        modules |= dict.fromkeys(gate_up, (size, hidden, False)) | {down: (hidden, size, False)}
    return modules


def _divided(
    modules: tuple[str, ...], sizes: tuple[int, ...], num_inputs: int, has_bias: bool
) -> dict[str, tuple[int, int, bool]]:
    """Return modules of these output sizes, or of their sum if the family fuses them."""
    if len(modules) == 1:
        sizes = (sum(sizes),)
    return {name: (size, num_inputs, has_bias) for name, size in zip(modules, sizes, strict=True)}


def _read_shards(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors; each must be in the file the index names."""
    index = directory / INDEX_FILE
    file_of = read_json_object(index, INDEX_BYTES).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise ModelError(f"{index}: weight_map: not an object that names files")
    for name, file_name in file_of.items():
        if not _is_plain_file_name(file_name):
            raise ModelError(f"{index}: tensor {name[:200]!r}: {str(file_name)[:200]!r} is no file of this folder")
    tensors: dict[str, StoredTensor] = {}
    for file_name in sorted(set(file_of.values())):
        for name, tensor in read_safetensors(directory / file_name).items():
            if file_of.get(name) != file_name:
                raise ModelError(f"{directory / file_name}: tensor {name[:200]!r}: not in this file by the index")
            tensors[name] = tensor
    for name, file_name in file_of.items():
        if name not in tensors:
            raise ModelError(f"{directory / file_name}: tensor {name[:200]!r}: missing, though the index names it")
    return tensors


def _is_plain_file_name(value: object) -> bool:
    return isinstance(value, str) and value.endswith(".safetensors") and not set(value) & set("/\\\0:")


def _check_names(directory: Path, shapes: dict[str, tuple[int, ...]], tensors: dict[str, StoredTensor]) -> None:
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise ModelError(f"{directory}: tensor {missing[0]!r}{_and_more(missing)}: missing")
    unexpected = sorted(set(tensors) - set(shapes))
    if unexpected:
        raise ModelError(f"{directory}: tensor {unexpected[0][:200]!r}{_and_more(unexpected)}: no part of this model")
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise ModelError(f"{tensor.file}: tensor {name!r}: shape {tensor.shape}, but config.json makes it {shape}")
        if tensor.dtype not in FLOATS:
            raise tensor.error(f"dtype is {DTYPE_WORDS[tensor.dtype]} (allowed: {', '.join(FLOAT_DTYPES)})")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
