"""memfit inside other libraries' trainers. Empty until the issue that fills it."""
