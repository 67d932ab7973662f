"""Operations on gradients that torch does not have."""
