"""Looking inside a model: what its heads do (recorder), what that means (findings), a page that shows it (report)."""
