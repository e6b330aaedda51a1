"""What lies on storage besides tensor bytes: names, records, the commit protocol, lineage, sweep. No torch here."""
