"""The artifact: recipe, tokenizer and weights in one file that knows its size.

Reading and writing are in files of their own, because the counted script (`submit.bundle`) carries
the modules that reading imports, and their bytes count:

    carried, to read      unpack  table  format  array_decoder  matrix_decoder  rans_decoder
                          frequencies  width_tables
    left out, to write    pack  array_encoder  matrix_encoder  rans_encoder  width_fit
    left out, sizes       budget  fit  size_before_training  size_while_training

Weights with one frequency table per tensor go through `array_*`. Grids, whose rows and columns
differ in width, go through `matrix_*`. Both run on `rans_*`. docs/format.md specifies every byte.
"""
