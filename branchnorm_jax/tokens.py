"""Token ids that have a meaning in every vocabulary of this project. The decoder starts from EOS."""

PAD, EOS, UNK = 0, 1, 2
