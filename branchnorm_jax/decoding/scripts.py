"""Ranges of characters, for use inside the brackets of regular expressions."""

CHINESE_OR_JAPANESE = "\u3001-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff9f\U00020000-\U0003ffff"
"""Scripts without spaces between sentences. Without their space, U+3000."""

UNSPACED = CHINESE_OR_JAPANESE + "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff"
"""Scripts without spaces between words: also Thai, Lao, Tibetan, Burmese and Khmer."""
