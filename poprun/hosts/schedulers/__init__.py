"""Where poprun finds its hosts when nobody names them: one file per scheduler."""
