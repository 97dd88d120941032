"""Many devices: meshes, collectives, sharded and server homes. Empty until the issue that fills it."""
