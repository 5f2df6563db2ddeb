"""The bytes of every token id: the half of a tokenizer that turns ids into text."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from model.errors import ModelError
from model.text.decoding import Decoding, byte_alphabet
from model.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

MAX_VOCAB_SIZE = 2**22  # an added token's id comes from the file, and tables are as long as the largest id


class Vocabulary:
    """Bytes by token id. Immutable. Ids are 0..size - 1; a few may have no token."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        """Read `backend`, which may change later. Raises ModelError if its ids are out of range."""
        tokens = _read_tokens(backend)
        ids = frozenset(i for i, token in enumerate(tokens) if token is not None)
        self._decoding = Decoding.of(backend)
        self._backend = backend if self._decoding else tokenizers.Tokenizer.from_str(backend.to_str())
        self._spoken_ids = ids
        self._spoken_ids_without_specials = ids - special_ids
        self._anchor = [i for i in sorted(ids - special_ids) if tokens[i].isalpha()][:1]
        self.pieces = self._read_pieces(tokens, special_ids)
        self._pieces_without_specials = [b"" if i in special_ids else piece for i, piece in enumerate(self.pieces)]

    @property
    def size(self) -> int:
        return len(self.pieces)

    def detokenizer(self, skip_special_tokens: bool, at_start: bool) -> Detokenizer:
        """Return a new stream; `at_start` as in `Tokenizer.detokenizer`."""
        if self._decoding is None:
            spoken = self._spoken_ids_without_specials if skip_special_tokens else self._spoken_ids
            return WindowDetokenizer(self._decode, [] if at_start else self._anchor, spoken)
        pieces = self._pieces_without_specials if skip_special_tokens else self.pieces
        return ByteDetokenizer(pieces, self._decoding.num_spaces_to_strip if at_start else 0)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def _read_pieces(self, tokens: list[str | None], special_ids: frozenset[int]) -> list[bytes]:
        if self._decoding is None:
            start = len(self._decode(self._anchor))  # the anchor makes each token a continuation
            return [self._decode([*self._anchor, i])[start:].encode() if t else b"" for i, t in enumerate(tokens)]
        verbatim = special_ids | _foreign_ids(self._backend)
        alphabet = byte_alphabet()
        return [
            token.encode() if i in verbatim else self._decoding.token_bytes(token, alphabet)
            for i, token in enumerate(token or "" for token in tokens)
        ]


def _read_tokens(backend: tokenizers.Tokenizer) -> list[str | None]:
    """Return the text of every id as the file writes it, with added tokens; None for an id without a token."""
    id_by_token = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    size = max([*id_by_token.values(), *added], default=-1) + 1
    if not 0 < size <= MAX_VOCAB_SIZE:
        raise ModelError(f"the tokenizer has {size} token ids, and 1 to {MAX_VOCAB_SIZE} can be served")
    tokens: list[str | None] = [None] * size
    for token, token_id in id_by_token.items():
        tokens[token_id] = token
    for token_id, token in added.items():
        tokens[token_id] = token.content
    return tokens


def _foreign_ids(backend: tokenizers.Tokenizer) -> set[int]:
    """Return the added tokens that the model lacks: they are plain text, not in the model's alphabet."""
    own = backend.get_vocab(with_added_tokens=False)
    return {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.content not in own}
