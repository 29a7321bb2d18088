"""Djinn: a remote accelerator as a local PyTorch device."""
