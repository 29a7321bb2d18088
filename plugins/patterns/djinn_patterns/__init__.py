"""Recognise parts of models by their data flow: recommenders, transformers, and fusion of modalities."""
