import pytest

from model import cuda_graphs

CHUNK_ROWS = (64,)  # sizes up to 512 take NumPy 0.3 s at each start of an engine with captures


@pytest.fixture(autouse=True, scope="module")
def few_captured_sizes():
    """Capture steps of at most 64 rows of chunks: most engines here have a budget of 64 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "CHUNK_ROWS", CHUNK_ROWS)
        patch.setattr(cuda_graphs, "CHUNK_ROWS_WITH_FEW", (16, 48, *CHUNK_ROWS))
        patch.setattr(cuda_graphs, "CHUNK_ROWS_ALONE", (32, *CHUNK_ROWS))
        yield
