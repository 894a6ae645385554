"""A data set's tokenizer as Hugging Face's files, which `AutoTokenizer` loads without SentencePiece.

A SentencePiece model is rewritten as the same algorithm of the `tokenizers` library (BPE by merge rank, or unigram),
with its byte fallback and its mark for spaces. That both give the same ids is checked on text, not assumed.
"""

from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, decoders, normalizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE, Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_pipeline.tokenizers.tokenizer import HUGGING_FACE_FILE, SENTENCEPIECE_FILE, Tokenizer

SPACE = "▁"


def write_tokenizer(source: Path, end_of_document: int, seq_len: int, folder: Path) -> None:
    """Put the tokenizer of the folder `source` into an exported model's folder."""
    if (source / SENTENCEPIECE_FILE).exists():
        processor = SentencePieceProcessor(model_file=str(source / SENTENCEPIECE_FILE))
        fast, end = _rewrite(processor), processor.id_to_piece(end_of_document)
        unknown = processor.id_to_piece(processor.unk_id())
    else:
        fast, unknown = FastTokenizer.from_file(str(source / HUGGING_FACE_FILE)), None
        end = fast.id_to_token(end_of_document)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=end,
        eos_token=end,
        unk_token=unknown,
        model_max_length=seq_len,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder)


def equal_encodings(ours: Tokenizer, folder: Path, texts: Sequence[str]) -> int:
    """On how many of the texts the exported tokenizer gives the same ids.

    Known to differ: the mark U+2581 in the text itself, and of a unigram the ties between splits of equal probability
    and text that spells a control or byte piece ("</s>"), which the library cannot tell from the piece."""
    theirs = AutoTokenizer.from_pretrained(folder, model_max_length=10**9)
    return sum(
        ours.encode(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True) for text in texts
    )


def _rewrite(processor: SentencePieceProcessor) -> FastTokenizer:
    size = processor.vocab_size()
    pieces = [processor.id_to_piece(i) for i in range(size)]
    scores = [processor.get_score(i) for i in range(size)]
    special = [i for i in range(size) if processor.is_control(i) or processor.is_unknown(i)]
    ordinary = {pieces[i]: i for i in range(size) if not processor.is_byte(i) and i not in special}
    merges = _merges(ordinary)
    if _is_bpe(processor, scores):
        model = BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token=pieces[processor.unk_id()],
            fuse_unk=True,
            byte_fallback=True,
        )
    else:
        model = Unigram(list(zip(pieces, scores, strict=True)), processor.unk_id(), byte_fallback=True)
    fast = FastTokenizer(model)
    fast.normalizer = normalizers.Replace(" ", SPACE)
    fast.decoder = decoders.Sequence([decoders.Replace(Regex(SPACE), " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.add_special_tokens([AddedToken(pieces[i], special=True, normalized=False) for i in special])
    return fast


def _is_bpe(processor: SentencePieceProcessor, scores: list[float]) -> bool:
    """BPE scores are minus the merge rank: whole numbers; unigram scores are log probabilities."""
    ordinary = [s for i, s in enumerate(scores) if not (processor.is_byte(i) or processor.is_control(i))]
    return all(score == int(score) for score in ordinary)


def _merges(ordinary: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two, best piece first: ids stand in the order of merging."""
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(ordinary, key=ordinary.__getitem__)
        for cut in range(1, len(piece))
        if piece[:cut] in ordinary and piece[cut:] in ordinary
    ]
