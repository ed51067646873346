"""Text: read, split, tokenized, packed and served in a resumable order."""

from focus_exp.data.corpus import SPLITS, Corpus, load_corpus
from focus_exp.data.loader import make_loader
from focus_exp.data.packing import SequenceDataset, TokenStream, find_prefix

__all__ = ["SPLITS", "Corpus", "SequenceDataset", "TokenStream", "find_prefix", "load_corpus", "make_loader"]
