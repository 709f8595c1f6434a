"""Two texts written for this package: one to calibrate 8-bit models with, one to measure them on."""
