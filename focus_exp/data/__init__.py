"""Text: fetched, split, tokenised once, cut into blocks, served in an order that can be resumed."""

from focus_exp.data.corpora import SPLITS, Corpus, load_corpus
from focus_exp.data.loader import ResumableLoader
from focus_exp.data.tokens import Blocks, TokenStream, bos_of

__all__ = ["SPLITS", "Blocks", "Corpus", "ResumableLoader", "TokenStream", "bos_of", "load_corpus"]
