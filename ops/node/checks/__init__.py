"""One concern a file: facts in, findings and wanted changes out."""
