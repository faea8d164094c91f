"""Operations whose result for a row never depends on the other rows."""
