"""The same sums, with norms rounded to e4m3."""

import pytest

from model.ops.gpu.group.paths import SumPath
from model.ops.interface import Fp8Rows
from tests.support.group_checks import on_ranks, total
from tests.support.kernel_checks import normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", [SumPath.PULL, SumPath.PUSH])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (16, 1024), (5, 8192)])
def test_quantised_norms_match_one_rank(open_group, rng, dtype, rows, width, path):
    ops = open_group(dtype)
    hosts, residual = [normal(rng, (rows, width), dtype) for _ in ops.ranks], normal(rng, (rows, width), dtype)
    weight = normal(rng, (width,), dtype)
    with ops.scratch():
        first = ops.ranks[0]
        first.use()
        alone = first.upload(residual)
        expected = first.add_rms_norm_quantised(first.upload(total(hosts)), alone, first.upload(weight), 1e-6)
        own, norm = ops.upload(residual), ops.upload(weight).parts
        out = Fp8Rows(ops.temporary((rows, width), "uint8"), ops.temporary((rows,), "float32"))
        outs = [Fp8Rows(*pair) for pair in zip(out.data.parts, out.scale.parts, strict=True)]
        ops.sums.sum_add_rms_norm(path, on_ranks(ops, hosts).parts, own.parts, norm, 1e-6, outs)
        data, scale, sums = (ops.download(array) for array in (out.data, out.scale, own))
        first.use()
        assert sums.tobytes() == first.download(alone).tobytes()
        assert scale.tobytes() == first.download(expected.scale).tobytes()
        assert data.tobytes() == first.download(expected.data).tobytes()
