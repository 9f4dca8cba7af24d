"""References that are written from the papers' formulas, in NumPy, without a look at the code under test."""
