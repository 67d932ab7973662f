"""Training loops of other libraries follow a schedule by one call each. A library is imported when it is used."""
