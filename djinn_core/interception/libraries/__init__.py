"""What libraries are told about the device, at the moment in which the user imports them; none is imported for it."""
