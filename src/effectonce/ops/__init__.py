"""Operations: what people who run effectonce use: the command line and the demo."""
