"""Mathematics: the network, its methods, its initialisation and its losses. Never a file, a device or a clock.

Array names carry their axes where a shape matters, as in `x_BSD` or `kernel_LDF`:

| letter | axis                | letter | axis                      |
|--------|---------------------|--------|---------------------------|
| B      | batch (rows)        | K      | head width                |
| S      | source length       | V      | vocabulary                |
| T      | target length       | L      | layers of one stack       |
| D      | model width         | E      | encoder layers            |
| F      | feed-forward width  | M      | decoder layers            |
| H      | heads               |        |                           |
"""
