"""From files to a model: configuration, tensors, formats, downloads."""
