"""What users ask: a search, and of its strategy what it says, what else there would be, and whether compilers agree."""
