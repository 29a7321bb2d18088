"""Patterns that recognise parts of models by data flow: recommenders, transformers, fusion of modalities."""
