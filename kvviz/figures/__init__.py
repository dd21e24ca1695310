"""Figures: pure functions from plain numbers to Plotly figures. They know nothing of the model, and nothing of Streamlit."""
