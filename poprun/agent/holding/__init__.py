"""The wait of reserves before their program begins."""
