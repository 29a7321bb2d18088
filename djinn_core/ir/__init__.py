"""The frozen nouns that travel through the pipeline: values in, values out, no I/O and no globals."""
