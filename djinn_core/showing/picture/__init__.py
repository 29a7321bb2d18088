"""A picture of a program: boxes for modules, arrows for data, as an SVG or as a page in which boxes unfold by a click."""
