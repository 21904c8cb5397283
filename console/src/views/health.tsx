import { Empty } from "../parts/notice";

export function HealthView() {
  return (
    <>
      <h1>Health</h1>
      <Empty>This view is being built.</Empty>
    </>
  );
}
