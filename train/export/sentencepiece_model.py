"""Rewrites a SentencePiece model as a tokenizer of the `tokenizers` library: BPE by merge rank, or unigram.

| SentencePiece                            | the `tokenizers` library                                      |
| ---------------------------------------- | ------------------------------------------------------------- |
| rule of normalization (NFKC, ...)        | normalizer `Precompiled`, from the same table                 |
| removal of extra spaces                  | normalizers that strip and collapse spaces                    |
| dummy prefix                             | normalizer `Prepend`; the decoder strips the space            |
| byte fallback                            | `byte_fallback` of the model; decoder `ByteFallback`          |
| user-defined symbols                     | added tokens that are not special                             |
| control pieces                           | special added tokens                                          |

The two libraries do not agree in everything, so `train.export.tokenizer` compares ids after each export.
"""

from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

SPACE = "▁"
"""SentencePiece's mark for a space, U+2581."""

_PROTO: Any = sentencepiece_model_pb2
"""The classes of a model's file. The module makes them at run time, so a type checker does not see them."""
_BELOW_ALL = -1e6
"""Score of the pieces that unigram must never choose for a text: control pieces and bytes that a text spells out."""

_WIDE_TILDE, _STAND_IN = "\uff5e", "\ufdd0"
"""A character that the rules nmt_* keep although NFKC replaces it, and a character that no text has, to protect it."""


class SentencePieceModel:
    """A SentencePiece model, and the same tokenizer in the `tokenizers` library."""

    def __init__(self, file: Path) -> None:
        self.processor = SentencePieceProcessor(model_file=str(file))
        self._model = _PROTO.ModelProto.FromString(file.read_bytes())
        ids = range(self.processor.vocab_size())
        self.pieces = [self.processor.id_to_piece(i) for i in ids]
        self._bytes = {i for i in ids if self.processor.is_byte(i)}
        self.special = [i for i in ids if self.processor.is_control(i) or self.processor.is_unknown(i)]
        user_defined = [i for i in ids if self._model.pieces[i].type == _PROTO.ModelProto.SentencePiece.USER_DEFINED]
        self.user_defined = [i for i in user_defined if " " not in self.pieces[i]]  # no text has a space by then

    @property
    def unknown(self) -> str:
        """The piece that stands for an unknown character."""
        return self.pieces[self.processor.unk_id()]

    def rewritten(self) -> Tokenizer:
        """The same tokenizer in the `tokenizers` library."""
        is_bpe = self._model.trainer_spec.model_type == _PROTO.TrainerSpec.BPE
        fast = Tokenizer(self._bpe() if is_bpe else self._unigram())
        fast.normalizer = self._normalizer()
        if not is_bpe and (cut := self._cut()):
            fast.pre_tokenizer = cut
        fast.decoder = self._decoder()
        fast.add_special_tokens([AddedToken(self.pieces[i], special=True, normalized=False) for i in self.special])
        fast.add_tokens([AddedToken(self.pieces[i], special=False, normalized=True) for i in self.user_defined])
        return fast

    def _bpe(self) -> BPE:
        return BPE(
            vocab={piece: i for i, piece in enumerate(self.pieces)},
            merges=_merges({self.pieces[i]: i for i in self._ordinary}),
            unk_token=self.unknown,
            fuse_unk=True,
            byte_fallback=bool(self._bytes),
        )

    @property
    def _ordinary(self) -> list[int]:
        """Ids of the pieces that text is cut into, by falling score: BPE merges in this order."""
        other = {*self._bytes, *self.special, *self.user_defined}
        ids = [i for i in range(len(self.pieces)) if i not in other]
        return sorted(ids, key=lambda i: (-self.processor.get_score(i), i))

    def _unigram(self) -> Unigram:
        hidden = {*self._bytes, *self.special}
        scores = [_BELOW_ALL if i in hidden else self.processor.get_score(i) for i in range(len(self.pieces))]
        return Unigram(
            list(zip(self.pieces, scores, strict=True)), self.processor.unk_id(), byte_fallback=bool(self._bytes)
        )

    def _cut(self) -> pre_tokenizers.PreTokenizer | None:
        """Cuts around characters that no piece has, if a hidden piece has such a character.

        Each segmentation cuts there, so a text that spells a hidden piece is never that piece. Without bytes, a run of
        such characters is one unknown token."""
        known = {character for i in self._ordinary for character in self.pieces[i]}
        if known >= {character for i in (*self._bytes, *self.special) for character in self.pieces[i]}:
            return None
        characters = "".join(f"\\x{{{ord(character):x}}}" for character in sorted(known))
        return pre_tokenizers.Split(Regex(f"[^{characters}]{'' if self._bytes else '+'}"), "isolated")

    def _normalizer(self) -> normalizers.Normalizer:
        spec = self._model.normalizer_spec
        steps: list[normalizers.Normalizer] = []
        if "nfkc" in spec.name:  # `Precompiled` looks at single characters, so compose the others before
            steps += [normalizers.Replace(_WIDE_TILDE, _STAND_IN)] if spec.name.startswith("nmt_") else []
            steps += [normalizers.NFKC(), normalizers.Replace(_STAND_IN, _WIDE_TILDE)]
        if spec.precompiled_charsmap:
            steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
        if spec.remove_extra_whitespaces:
            if not self._bytes:  # else a text with the mark is encoded as bytes (`data_pipeline.tokenizers`)
                steps.append(normalizers.Replace(SPACE, " "))
            steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if spec.add_dummy_prefix:
            steps.append(normalizers.Prepend(SPACE))
        return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])

    def _decoder(self) -> decoders.Decoder:
        steps = [decoders.Replace(Regex(SPACE), " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._model.normalizer_spec.add_dummy_prefix:
            steps.append(decoders.Strip(" ", 1, 0))
        return decoders.Sequence(steps)


def _merges(ordinary: dict[str, int]) -> list[tuple[str, str]]:
    """Each way to merge two pieces into one, in the order of the merged pieces."""
    return [
        (piece[:cut], piece[cut:])
        for piece in ordinary
        for cut in range(1, len(piece))
        if piece[:cut] in ordinary and piece[cut:] in ordinary
    ]
