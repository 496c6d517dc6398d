"""What the devices of a pipeline do when, planned or measured: as text, as SVG, and for Perfetto."""
