"""Text in and out of a model: tokenizers, chat templates, detokenising, stop strings. Knows no torch."""
