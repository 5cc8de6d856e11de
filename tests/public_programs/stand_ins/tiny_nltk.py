"""NLTK's sentences without its data."""

import nltk
import transformers.utils

nltk.sent_tokenize = lambda text: text.split(". ")
nltk.data.find = lambda *_, **__: True
transformers.utils.is_offline_mode = lambda: True  # the examples look for it before they download
