"""Which experts a later layer will want."""
