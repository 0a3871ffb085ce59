"""A FastAPI application in which a double click starts one job: `uvicorn examples.fastapi_jobs.main:app`."""
