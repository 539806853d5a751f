"""The parts of vision towers and of what joins them to a language model.

Words: an *image* is one input of a tower; a *patch* is a small square of it, numbered row by row from the upper left. The
`batch` of a tower are images, its `pos` class tokens and then patches. A *token* of an image is one position of the text.
"""
