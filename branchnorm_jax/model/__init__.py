"""The network: layers, methods, initialisation and losses. Nothing here accesses files, devices or clocks.

Array names carry their axes where a shape matters, as in `x_BSD` or `kernel_LDF`:

| letter | axis                | letter | axis                      |
|--------|---------------------|--------|---------------------------|
| B      | batch (rows)        | K      | head width                |
| S      | source length       | V      | vocabulary                |
| T      | target length       | L      | layers of one stack       |
| D      | model width         | M      | decoder layers            |
| F      | feed-forward width  | N      | slots of a decoding cache |
| H      | heads               | Q      | hypotheses of a sentence  |
"""
