"""DFlash: a draft that guesses a whole block in one forward (Chen et al. 2026, arXiv:2602.06036)."""
