from pathlib import Path

import pytest

from model.text.tokenizer import Tokenizer
from tests.support.make_tokenizers import ALL_STYLES


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return model folders by the style of their tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {style.__name__: style(root / style.__name__) for style in ALL_STYLES}


@pytest.fixture(scope="session")
def readers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.read(folder) for name, folder in folders.items()}
