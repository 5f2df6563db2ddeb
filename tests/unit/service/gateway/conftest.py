import pytest

from tests.support.gateway import open_gateway, write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def gateway(model_folder):
    async with open_gateway(model_folder) as opened:
        yield opened
