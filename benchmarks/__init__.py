"""Claims and the commands that measure them. `make bench` lists them."""
